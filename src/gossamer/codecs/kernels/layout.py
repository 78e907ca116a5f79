"""Layout: where a block-wise payload keeps its header and its codes, and the constants that every kernel shares.

A payload is one uint8 tensor: fp32 words of all blocks (``words`` rows of one word per block), then the codes. Codes are
packed in *planes*: with ``m`` bytes per block, byte ``j`` holds the codes of the elements ``j``, ``j + m``, ``j + 2·m`` …
of its block, lowest bits first. Neighbours in a byte are far apart in the tensor, so packing needs no shuffles and every
loop runs over contiguous memory. The last block may be shorter; its ``m`` then is ``ceil(length · bits / 8)``.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

SHRINK = 1 - 2.0**-22
"""Steps are this much shorter than range / levels, so that rounding never carries the top level beyond the largest fp32."""

HUGE, TINY = 2.0**100, 2.0**-60
"""Half ranges outside of these are scaled before an element is divided by its step."""

M1, M2, SHIFT1, SHIFT2 = 0x7FEB352D, 0x846CA68B, 16, 15
"""The mixing function of Wellons' hash prospector ("lowbias32")."""

MASK = 0xFFFFFFFF

WEYL = 0x9E3779B1
"""An odd number near 2³² times the golden ratio: the upper bits of its multiples are spread evenly over all that there are."""


@dataclass(frozen=True)
class Blocks:
    """``bits`` per element, ``words`` of fp32 per block of ``block`` elements."""

    bits: int
    words: int
    block: int

    @property
    def planes(self) -> int:
        """Elements per byte."""
        return 8 // self.bits

    def count(self, numel: int) -> int:
        """Number of blocks."""
        return -(-numel // self.block)

    def header_bytes(self, numel: int) -> int:
        """Length of the header."""
        return 4 * self.words * self.count(numel)

    def code_bytes(self, numel: int) -> int:
        """Length of the codes of ``numel`` elements."""
        return -(-numel * self.bits // 8)

    def nbytes(self, numel: int) -> int:
        """Length of a whole payload."""
        return self.header_bytes(numel) + self.code_bytes(numel)

    def empty(self, like: Tensor) -> Tensor:
        """A payload to fill, on the device of ``like``."""
        return torch.empty(self.nbytes(like.numel()), dtype=torch.uint8, device=like.device)

    def split(self, payload: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """Header, ``float32[words, blocks]``, and codes, ``uint8``. Views where alignment allows (a header may be copied)."""
        end = self.header_bytes(numel)
        header = payload[:end]
        if header.storage_offset() % 4 or payload.data_ptr() % 4:
            header = header.clone()
        return header.view(torch.float32).view(self.words, -1 if end else 0), payload[end:]


@dataclass(frozen=True)
class Grid(Blocks):
    """Equidistant levels between a block's smallest and largest value, or between ±max|x| (``symmetric``)."""

    stochastic: bool = False

    @property
    def symmetric(self) -> bool:
        """Whether the header has the step alone: the grid is centred on zero."""
        return self.words == 1

    @property
    def top(self) -> int:
        """The largest code: 255, 15, 3; or 254, 14, 2, so that zero is a level."""
        return (1 << self.bits) - 1 - self.symmetric

    @property
    def inverse(self) -> float:
        """Half a step per half range, rounded down (to be used as fp32)."""
        return SHRINK / self.top


Keys = tuple[int, int] | tuple[Tensor, Tensor]
"""Two words of 32 bits; ``int64`` tensors of one element where only the device knows them."""


def keys(seed: int) -> tuple[int, int]:
    """Two words of 32 bits from any integer (splitmix64), for the hash of an element's index."""
    word = (seed + 0x9E3779B97F4A7C15) % 2**64
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    word = (word ^ word >> 27) * 0x94D049BB133111EB % 2**64
    word ^= word >> 31
    return word >> 32, word & MASK


def noise_key(seed: int) -> int:
    """The word of 32 bits to which multiples of ``WEYL`` are added: the upper 16 bits of the sum are the noise that rounds an
    element to bfloat16, evenly spread over the elements of a tensor and at random over the seeds."""
    high, low = keys(seed)
    return high ^ low


def signed(word: int, bits: int = 32) -> int:
    """The signed integer that has the bits of an unsigned one."""
    return word - (word >> (bits - 1) << bits)
