"""Modulo quantization: the last bits of numbers, for receivers that hold nearly the same numbers."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.codecs.kernels.reference import pack, unpack
from gossamer.codecs.rounding import in_blocks
from gossamer.memory import portion

BLOCK = 512
"""Elements that share a step and a checksum. The largest difference in a whole tensor is a hundred times what most elements
differ by; with far fewer elements, what is told about a block is as long as the block. (A convnet on 16 workers in 4 bits:
replicas end 1.4 % apart with 4096, 1.0 % with 1024, 0.9 % with 512 and with 256, and 0.7 % if nothing is rounded.)"""


@dataclass(frozen=True, slots=True)
class ModuloGrid:
    """Places of values: whole numbers, times the step of their block; and messages that tell their last ``bits`` bits.

    Of all places with these bits a receiver takes the one nearest to its own value's. A checksum per block tells whether
    that is the sender's.

    Bytes: bits/8 per element, and 4 per block of 512, the last of which is filled up.

    Source: modulo quantization, Lu and De Sa 2020 (arXiv 2002.11787); a checksum and a step for each block are ours.
    """

    bits: int
    steps: Tensor
    """``[blocks]``, above zero, in the type of the values. With few significant bits (bfloat16 values), multiples are exact."""

    def pack(self, values: Tensor) -> Tensor:
        """The last bits of each value's place, and a checksum of each block: ``uint8[blocks · (512 · bits/8 + 4)]``."""
        message = torch.empty(len(self.steps) * (self._width + 4), dtype=torch.uint8, device=values.device)
        codes, sums = self._parts(message)
        for elements, rows in pieces(values):
            places = self._places(values[elements], rows)
            codes[rows] = pack(places & (2**self.bits - 1), self.bits)
            sums[rows] = checksum(places)
        return message

    def difference(self, message: Tensor, own: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
        """How far the sender's values are from ``own``, those of the blocks ``rows``, in whole steps: ``[elements]``. And
        which blocks were understood: ``bool[blocks]``; of the others the differences are finite, but wrong."""
        codes, sums = self._parts(message)
        places = self._places(own, rows)
        half = 2 ** (self.bits - 1)
        ahead = ((unpack(codes[rows], self.bits, BLOCK) - places + half) & (2**self.bits - 1)) - half
        true = checksum(places + ahead) == sums[rows]
        return (ahead * self.steps[rows].unsqueeze(1)).view(-1)[: own.numel()], true

    @property
    def most(self) -> Tensor:
        """Values from which on places are no 32-bit integers, and checksums tell nothing: ``[blocks]``."""
        return self.steps * 2.0**30

    def _places(self, values: Tensor, rows: slice) -> Tensor:
        """``int32[blocks, 512]``: a value is about place · step."""
        return (in_blocks(values, BLOCK) * (1 / self.steps[rows]).unsqueeze(1)).round_().to(torch.int32)

    @property
    def _width(self) -> int:
        return BLOCK * self.bits // 8

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        codes, sums = message.tensor_split([len(self.steps) * self._width])
        return codes.view(-1, self._width), sums.view(torch.int32)


def pieces(tensor: Tensor) -> Iterator[tuple[slice, slice]]:
    """A flat tensor's elements, and their blocks, so many at a time that a CPU keeps them in its cache."""
    size = portion(tensor)  # whole blocks
    for begin in range(0, max(1, tensor.numel()), size):
        end = min(begin + size, tensor.numel())
        yield slice(begin, end), slice(begin // BLOCK, -(-end // BLOCK))


def reach(tensor: Tensor) -> Tensor:
    """The largest magnitude in each block: ``[blocks]``."""
    return in_blocks(tensor, BLOCK).abs().amax(dim=1)  # on a CPU 20 times as fast as the norm


def scale_blocks(tensor: Tensor, factors: Tensor) -> None:
    """Multiply each block of a flat tensor, in place, by its factor (``[blocks]``, of any type)."""
    for elements, rows in pieces(tensor):
        piece = tensor[elements]
        piece.mul_(factors[rows].to(tensor.dtype).repeat_interleave(BLOCK)[: piece.numel()])


def checksum(places: Tensor) -> Tensor:
    """A linear hash of each block: ``int32[blocks]``. Places that are wrong by whole turns, some up and some down, change it:
    each counts with a random factor of its own. Sums and products wrap around."""
    return (places * _factors(places.device)).sum(dim=1, dtype=torch.int32)


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """``int32[512]``: odd numbers, the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**31), 2**31, (BLOCK,), dtype=torch.int32, generator=generator, device="cpu")
    return (factors | 1).to(device)
