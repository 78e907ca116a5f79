"""Sign: one bit per element, and the mean size of every block."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.codecs.base import Codec
from gossamer.codecs.kernels import kernels_for, single
from gossamer.codecs.kernels.layout import Blocks
from gossamer.codecs.kernels.reference import finite_or
from gossamer.codecs.rounding import check_block, mean_size, rounding_of


@dataclass(frozen=True, kw_only=True)
class Sign(Codec):
    """Each element becomes its sign times the mean absolute value of its ``block``: the best one-bit value in L2.

    Bytes: 1/8 per element, and 4 per block, in one uint8 tensor: the header, then the sign bits. Zero counts as positive.
    Biased: use it with error feedback. A block with a NaN or inf decodes to NaN.

    Source: Karimireddy et al. 2019 (arXiv 1901.09847); 1-bit Adam, Tang et al. 2021 (arXiv 2102.02888).
    """

    block: int = 1024

    def __post_init__(self) -> None:
        check_block(self.block)

    @property
    def blocks(self) -> Blocks:
        """The place of scales and bits in a payload."""
        return Blocks(1, 1, self.block)

    def encode(self, tensor: Tensor, seed: int = 0) -> Tensor:
        payload = self.blocks.empty(tensor)
        kernels_for(tensor.device.type).sign(single(tensor), None, self.blocks, payload, None)
        return payload

    def decode(self, payload: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
        values = torch.empty(numel, dtype=torch.float32, device=payload.device)
        kernels_for(payload.device.type).unsign(payload, values, self.blocks, False)
        return values.to(dtype)

    def encode_rest(self, tensor: Tensor, residual: Tensor | None, seed: int = 0) -> tuple[Tensor, Tensor]:
        if tensor.dtype == torch.float64:
            return super().encode_rest(tensor, residual, seed)
        x = single(tensor)
        payload, rest = self.blocks.empty(x), torch.empty_like(x)
        before = None if residual is None else single(residual)
        kernels_for(x.device.type).sign(x, before, self.blocks, payload, rest)
        return payload, rest if rest.dtype == tensor.dtype else finite_or(rest.to(tensor.dtype), residual)

    def add_decoded(self, payload: Tensor, total: Tensor) -> None:
        if total.dtype == torch.float32 and total.is_contiguous():
            kernels_for(payload.device.type).unsign(payload, total, self.blocks, True)
        else:
            super().add_decoded(payload, total)

    def error_bound(self, tensor: Tensor) -> Tensor:
        size = tensor.double().abs()
        mean = mean_size(tensor.double(), self.block)
        # The mean is summed in fp32, in any order: at most (block − 1) roundings, of which far fewer add up.
        return (size - mean).abs() + mean * (self.block * 2.0**-24) + rounding_of(size + mean, tensor.dtype)
