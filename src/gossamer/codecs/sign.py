"""Sign: one bit per element, and the mean size of every block."""

from dataclasses import dataclass

from torch import Tensor

from gossamer.codecs.blockwise import Blockwise
from gossamer.codecs.kernels import kernels_for
from gossamer.codecs.kernels.layout import Blocks
from gossamer.codecs.rounding import check_block, mean_size, rounding_of


@dataclass(frozen=True, kw_only=True)
class Sign(Blockwise):
    """Each element becomes its sign times the mean absolute value of its ``block``: the best one-bit value in L2.

    Bytes: 1/8 per element, and 4 per block, in one uint8 tensor: the header, then the sign bits. Zero counts as positive.
    Biased: use it with error feedback. A block has from 8 to 16384 elements, a multiple of 8;
    with a NaN or inf it decodes to NaN.

    Source: Karimireddy et al. 2019 (arXiv 1901.09847); 1-bit Adam, Tang et al. 2021 (arXiv 2102.02888).
    """

    block: int = 1024

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def blocks(self) -> Blocks:
        """The place of scales and bits in a payload."""
        return Blocks(1, 1, self.block)

    def write(self, x: Tensor, residual: Tensor | None, seed: int, payload: Tensor, rest: Tensor | None) -> None:
        kernels_for(x.device).sign(x, residual, self.blocks, seed, payload, rest)

    def read(self, payload: Tensor, values: Tensor, add: bool) -> None:
        kernels_for(payload.device).unsign(payload, values, self.blocks, add)

    def error_bound(self, tensor: Tensor) -> Tensor:
        size = tensor.double().abs()
        mean = mean_size(tensor.double(), self.block)
        # The mean is summed in fp32, in any order: at most (block − 1) roundings, of which far fewer add up.
        return (size - mean).abs() + mean * (self.block * 2.0**-24) + rounding_of(size + mean, tensor.dtype)
