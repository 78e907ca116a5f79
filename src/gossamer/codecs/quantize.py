"""Quantize: 8, 4 or 2 bits per element on a grid of its own for every block."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from gossamer.codecs.blockwise import Blockwise
from gossamer.codecs.kernels import kernels_for
from gossamer.codecs.kernels.layout import Grid
from gossamer.codecs.rounding import check_block, largest, rounding_of, smallest
from gossamer.codecs.wire import check_choice

Bits = Literal[8, 4, 2]
Scheme = Literal["minmax", "symmetric"]
Rounding = Literal["nearest", "stochastic"]


@dataclass(frozen=True, kw_only=True)
class Quantize(Blockwise):
    """Round to 2^bits levels between the smallest and the largest value of each ``block`` (``"minmax"``, one of BAGUA's
    codecs), or to 2^bits − 1 levels between ±max|x| (``"symmetric"``: zero stays zero).

    ``rounding="stochastic"`` goes up or down at random so that the mean is the value (QSGD); ``"nearest"`` has half the
    error but is biased: use it with error feedback.

    Bytes: bits/8 per element, and 8 (``"symmetric"``: 4) per block, in one uint8 tensor: the header, then the codes.
    Arithmetic is fp32: values beyond its range are not representable. A block with a NaN or inf decodes to NaN.
    A block has from 8 to 16384 elements, a multiple of 8.

    Source: Gan et al. 2021 (arXiv 2107.01499); Alistarh et al. 2017 (arXiv 1610.02132).
    """

    bits: Bits = 8
    scheme: Scheme = "minmax"
    rounding: Rounding = "nearest"
    block: int = 512

    def __post_init__(self) -> None:
        for name, choices in (("bits", Bits), ("scheme", Scheme), ("rounding", Rounding)):
            check_choice(name, getattr(self, name), choices)
        check_block(self.block)

    @property
    def unbiased(self) -> bool:
        """Whether decoding gives the tensor on average over the seeds."""
        return self.rounding == "stochastic"

    @property
    def grid(self) -> Grid:
        """The levels and their place in a payload."""
        return Grid(self.bits, 1 if self.scheme == "symmetric" else 2, self.block, self.rounding == "stochastic")

    @property
    def blocks(self) -> Grid:
        return self.grid

    def write(self, x: Tensor, residual: Tensor | None, seed: int, payload: Tensor, rest: Tensor | None) -> None:
        kernels_for(x.device).quantize(x, residual, self.grid, seed, payload, rest)

    def read(self, payload: Tensor, values: Tensor, add: bool) -> None:
        kernels_for(payload.device).dequantize(payload, values, self.grid, add)

    def error_bound(self, tensor: Tensor) -> Tensor:
        lo, hi = (extreme(tensor.double(), self.block) for extreme in (smallest, largest))
        reach = 2 * torch.maximum(-lo, hi) if self.scheme == "symmetric" else hi - lo
        step = reach / self.grid.top
        # Beyond the step: the grid is 2⁻²² short, and its values are made with three roundings of numbers within the reach.
        slack = reach * 2.0**-21 + torch.maximum(lo.abs(), hi.abs()) * 2.0**-22 + 2.0**-140
        within = step * (1.0 if self.unbiased else 0.5) + slack
        return within + rounding_of(tensor.double().abs() + within, tensor.dtype)
