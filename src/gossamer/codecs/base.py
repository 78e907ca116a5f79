"""Codec: a local, lossy encoding of one flat tensor."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Codec(ABC):
    """Encode a flat tensor for the wire and decode it again. Stateless; hyper-parameters are frozen fields.

    Laws (checked for every codec): ``decode(encode(x))`` is within :meth:`error_bound` of ``x``; decoding is a pure
    function of the payload, bit-identical on every rank; non-finite values stay visible after decoding.
    """

    @abstractmethod
    def encode(self, tensor: Tensor) -> Tensor:
        """The payload of a 1-D floating-point tensor: one contiguous tensor, never an alias that a caller may write."""

    @abstractmethod
    def decode(self, payload: Tensor, dtype: torch.dtype) -> Tensor:
        """The 1-D tensor of type ``dtype`` that a payload stands for."""

    @abstractmethod
    def error_bound(self, tensor: Tensor) -> Tensor:
        """Elementwise bound on ``|decode(encode(x)) − x|`` for finite ``x`` within the codec's range."""
