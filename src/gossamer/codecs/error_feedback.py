"""ErrorFeedback: a codec that remembers what it did not send and adds it to what it sends next."""

from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor

from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Wire, wire_codec
from gossamer.codecs.quantize import Quantize
from gossamer.errors import ConfigurationError
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Codec):
    """``ErrorFeedback(codec)``: nothing is lost, only late. Same bytes on the wire as ``codec``.

    Memory: one ``residual`` per element, in full precision by default, or in half of it. What a half-precision
    residual rounds away is lost; with ``"bf16"`` that is at most 1/256 of the residual per step. A residual is always
    finite: a step that overflowed leaves it as it was, and ``"fp16"`` cuts it off at 65504.

    Source: Seide et al. 2014 (Interspeech); Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    codec: Codec = field(default_factory=Quantize, kw_only=False)
    residual: Wire = "fp32"

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigurationError("ErrorFeedback around ErrorFeedback would remember the same error twice")
        if not isinstance(self.codec, Codec):
            raise ConfigurationError(f"ErrorFeedback wraps a codec, as in ErrorFeedback(Sign()); got {self.codec!r}")
        if self.residual not in get_args(Wire):
            raise ConfigurationError(f"residual must be one of {', '.join(get_args(Wire))}; got {self.residual!r}")

    @property
    def unbiased(self) -> bool:
        return self.codec.unbiased

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        return self.codec.encode(tensor, seed)

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return self.codec.decode(payload, numel, dtype)

    def error_bound(self, tensor: Tensor) -> Tensor:
        return self.codec.error_bound(tensor)

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        return self.codec.encode_rest(tensor, residual, seed)

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        self.codec.add_decoded(payload, total)

    def send(self, tensor: Tensor, state: State, key: str, seed: int = 0) -> Tensor:
        residual = state[key].to(tensor.dtype) if key in state else None
        payload, rest = self.codec.encode_rest(tensor, residual, seed)
        narrow = wire_codec(self.residual).wire_dtype(rest.dtype)
        most = torch.finfo(narrow).max
        state[key] = rest if narrow == rest.dtype else rest.clamp_(-most, most).to(narrow)
        return payload
