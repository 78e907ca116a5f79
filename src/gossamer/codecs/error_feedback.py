"""ErrorFeedback: a codec that remembers what it did not send and adds it to what it sends next."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.checks import is_number
from gossamer.codecs.base import Codec
from gossamer.codecs.contraction import check_contracts, check_hashable
from gossamer.codecs.quantize import Quantize
from gossamer.codecs.wire import Wire, check_wire, narrowed
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import State


def check_decay(decay: object) -> None:
    """Raise ConfigurationError unless it is a share of what is remembered."""
    if not (is_number(decay) and 0 <= decay <= 1):
        raise ConfigurationError(f"decay must be the share of the residual that is kept, from 0 to 1; got {decay!r}")


def faded(residual: Tensor | None, decay: float) -> Tensor | None:
    """What is remembered, times ``decay``, in full precision; itself where that is 1."""
    return residual if residual is None or decay == 1 else wide(residual) * decay


@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(Codec):
    """``ErrorFeedback(codec)``: what is lost comes later. Same bytes on the wire as ``codec``.

    Memory: one ``residual`` per element. Tensors of 16 bits are encoded as fp32 ones are. ``"bf16"`` rounds what it keeps
    stochastically, by at most 1/128 of it per step, and by 0 on average (``seed`` has to be another one in each step).
    ``"fp16"`` rounds to the nearest number, at most 65504. ``"fp32"`` keeps full precision in twice the memory. A residual is
    always finite: a step that overflowed leaves it as it was.

    ``decay``: what is remembered is multiplied by it before it is added, so that sent + kept = decay·had + tensor. Below 1,
    what waits for long fades: for what others have meanwhile learned without it.

    Not around codecs of which it would remember more and more (``RandomK(unbiased=True)``).

    Source: Seide et al. 2014 (Interspeech); Karimireddy et al. 2019 (arXiv 1901.09847).
    """

    codec: Codec = field(default_factory=Quantize, kw_only=False)
    residual: Wire = "bf16"
    decay: float = 1.0

    def __post_init__(self) -> None:
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigurationError("ErrorFeedback around ErrorFeedback would remember the same error twice")
        if not isinstance(self.codec, Codec):
            raise ConfigurationError(f"ErrorFeedback wraps a codec, as in ErrorFeedback(Sign()); got {self.codec!r}")
        check_hashable(self.codec)
        check_contracts(self.codec)
        check_wire("residual", self.residual)
        check_decay(self.decay)

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

    def norm(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        return self.codec.norm(payload, numel, dtype)

    def send(self, tensor: Tensor, state: State, key: str, seed: int = 0) -> Tensor:
        flat, unsent = wide(tensor), state.get(key)
        if unsent is not None and unsent.dtype.itemsize > flat.dtype.itemsize:
            unsent = unsent.to(flat.dtype)
        unsent = faded(unsent, self.decay)
        rest = state.fresh(key, flat, narrowed(flat.dtype, self.residual))
        payload = self.codec.encode_keeping(flat, unsent, seed, rest)
        state[key] = rest
        return payload
