"""ErrorFeedback: a codec that remembers what it did not send and adds it to what it sends next."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Wire, check_wire
from gossamer.codecs.contraction import check_contracts, check_hashable
from gossamer.codecs.quantize import Quantize
from gossamer.codecs.residual import keep_back
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Codec):
    """``ErrorFeedback(codec)``: nothing is lost, only late. Same bytes on the wire as ``codec``.

    Memory: one ``residual`` per element, in full precision by default (fp32 for tensors of 16 bits, which are encoded as fp32
    ones are, so that nothing is rounded on the way), or in 16 bits. What a residual of 16 bits rounds away is lost; with
    ``"bf16"`` that is at most 1/256 of it per step. A residual is always finite: a step that overflowed leaves it as it was,
    and ``"fp16"`` cuts it off at 65504.

    Not around codecs of which it would remember more and more (``RandomK(unbiased=True)``).

    Source: Seide et al. 2014 (Interspeech); Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    codec: Codec = field(default_factory=Quantize, kw_only=False)
    residual: Wire = "fp32"

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigurationError("ErrorFeedback around ErrorFeedback would remember the same error twice")
        if not isinstance(self.codec, Codec):
            raise ConfigurationError(f"ErrorFeedback wraps a codec, as in ErrorFeedback(Sign()); got {self.codec!r}")
        check_hashable(self.codec)
        check_contracts(self.codec)
        check_wire("residual", self.residual)

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

    def encode_keeping(self, tensor: Tensor, residual: Tensor | None, seed: int, rest: Tensor) -> Tensor:
        return self.codec.encode_keeping(tensor, residual, seed, rest)

    def decode_into(self, payload: Tensor, out: Tensor) -> None:
        self.codec.decode_into(payload, out)

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        self.codec.add_decoded(payload, total)

    def witness(self, payload: Tensor, numel: int) -> Tensor | None:
        return self.codec.witness(payload, numel)

    def send(self, tensor: Tensor, state: State, key: str, seed: int = 0) -> Tensor:
        flat, owed = wide(tensor), state.get(key)
        payload, rest = self.codec.encode_rest(flat, None if owed is None else owed.to(flat.dtype), seed)
        keep_back(state, rest, self.residual, key)
        return payload
