"""Modulo quantization: the last bits of numbers, for receivers that hold nearly the same numbers.

Why blocks of 512: replicas end as far apart as a grid is wide, which the largest difference in it sets. The convnet with 16
workers: 2.3 % apart with a grid per tensor, 1.4 with 4096 weights, 1.0 with 1024, 0.9 with 512 or 256. Why the checksum has a
factor for each place: a plain sum does not see one place a turn too high and another a turn too low.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from gossamer.codecs.kernels import kernels_of
from gossamer.codecs.kernels.reference import pieces
from gossamer.codecs.rounding import in_blocks

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

    def pack(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """The last bits of each value's place, and a checksum of each block: ``uint8[blocks · (512 · bits/8 + 4)]``. And the
        largest magnitude in each: ``[blocks]``."""
        message = torch.empty(len(self.steps) * (self._width + 4), dtype=torch.uint8, device=values.device)
        grid = self.steps, self.bits, _factors(values.device)
        return message, kernels_of(values).modulo_pack(values, *grid, *self._parts(message))

    def difference(self, message: Tensor, own: Tensor, share: float, out: Tensor, add: bool) -> tuple[Tensor, Tensor]:
        """How far the sender's values are from ``own``, in whole steps, times ``share``: written to ``out``, like ``own`` (or
        itself), or added. Returns which blocks were understood, ``bool[blocks]``; of the others the differences are finite, but
        wrong. And how far the furthest value in each is, ``[blocks]``."""
        given = *self._parts(message), own, self.steps, self.bits, _factors(own.device)
        return kernels_of(own).modulo_difference(*given, share, out, add)

    @property
    def most(self) -> Tensor:
        """Values from which on places are no 32-bit integers, and checksums tell nothing: ``[blocks]``."""
        return self.steps * 2.0**30

    @property
    def _width(self) -> int:
        return BLOCK * self.bits // 8

    def _parts(self, message: Tensor) -> tuple[Tensor, Tensor]:
        codes, sums = message.tensor_split([len(self.steps) * self._width])
        return codes.view(-1, self._width), sums.view(torch.int32)


def reach(tensor: Tensor) -> Tensor:
    """The largest magnitude in each block: ``[blocks]``."""
    return torch.cat([in_blocks(tensor[elements], BLOCK).abs().amax(dim=1) for elements, _ in pieces(tensor, BLOCK)])


def scale_blocks(tensor: Tensor, factors: Tensor) -> None:
    """Multiply each block of a flat tensor, in place, by its factor (``[blocks]``, of any type)."""
    rows = torch.nonzero(factors != 1).flatten().tolist() if tensor.device.type == "cpu" else None
    if rows is None or len(rows) > FEW:  # elsewhere it would have to be waited for which
        scale_all_blocks(tensor, factors)
        return
    for row in rows:
        tensor[row * BLOCK : (row + 1) * BLOCK] *= float(factors[row])


FEW = 64
"""Blocks that are scaled one by one."""


def scale_all_blocks(tensor: Tensor, factors: Tensor) -> None:
    """The same, without asking which factors are 1."""
    for elements, rows in pieces(tensor, BLOCK):
        piece = tensor[elements]
        piece.mul_(factors[rows].to(tensor.dtype).repeat_interleave(BLOCK)[: piece.numel()])


@lru_cache
def _factors(device: torch.device) -> Tensor:
    """``int32[512]``: odd numbers, the same everywhere."""
    generator = torch.Generator().manual_seed(0)
    factors = torch.randint(-(2**31), 2**31, (BLOCK,), dtype=torch.int32, generator=generator, device="cpu")
    return (factors | 1).to(device)
