"""Codec: a local, lossy encoding of one flat tensor."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codecs.residual import keep
from gossamer.codecs.rounding import finite_or
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Encode a flat tensor for the wire and decode it again. Hyper-parameters are frozen fields.

    Laws (checked for every codec): ``decode(encode(x))`` is within :meth:`error_bound` of ``x``; decoding is a pure
    function of the payload, bit-identical on every rank and by every kernel; sent + kept = had; codecs that round at
    random are unbiased; non-finite values stay visible after decoding.

    ``seed`` is where randomness comes from, never a global generator: the same seed, the same payload.
    """

    @property
    def unbiased(self) -> bool:
        """Whether the mean over all seeds of what a payload decodes to is the tensor."""
        return False

    @abstractmethod
    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        """The payload of a 1-D floating-point tensor: one contiguous tensor, never an alias that a caller may write.

        Its shape and dtype depend on the tensor's length and dtype alone, never on its values.
        """

    @abstractmethod
    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The 1-D tensor of ``numel`` elements of type ``dtype`` that a payload stands for."""

    @abstractmethod
    def error_bound(self, tensor: Tensor) -> Tensor:
        """Elementwise bound on ``|decode(encode(x)) − x|`` for finite ``x`` within the codec's range."""

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        """The payload of ``tensor + residual``, and the rest that it does not carry (like ``tensor``, newly made).

        The rest is always finite: where a value, or what it decodes to, is not, the residual stays as it was. That may have
        fewer bits than the tensor.
        """
        wanted = tensor.clone() if residual is None else tensor + residual
        payload = self.encode(wanted, seed)
        return payload, finite_or(wanted.sub_(self.decode(payload, wanted.numel(), wanted.dtype)), residual)

    def encode_keeping(self, tensor: Tensor, residual: Tensor | None, seed: int, rest: Tensor) -> Tensor:
        """The payload of :meth:`encode_rest`; the rest goes into ``rest``, which may be ``tensor`` itself, or have fewer bits
        (:func:`~gossamer.codecs.residual.keep`)."""
        payload, left = self.encode_rest(tensor, residual, seed)
        keep(left, rest, seed)
        return payload

    def decode_into(self, payload: Tensor, out: Tensor) -> None:
        """Write what a payload stands for to ``out``."""
        out.copy_(self.decode(payload, out.numel(), out.dtype))

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        """Add what a payload stands for to ``total``, in place."""
        total.add_(self.decode(payload, total.numel(), total.dtype))

    def norm(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        """The L2 norm of what a payload stands for."""
        norm: Tensor = torch.linalg.vector_norm(self.decode(payload, numel, dtype))
        return norm

    def send(self, tensor: Tensor, state: State, key: str, seed: int = 0) -> Tensor:
        """The payload of ``tensor``, with whatever the codec remembers under ``key``; plain codecs remember nothing."""
        return self.encode(tensor, seed)
