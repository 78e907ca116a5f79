"""Rounding: what codecs share: blocks of a flat tensor and their extremes, the error of a dtype, a rest that is finite."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.checks import is_whole
from gossamer.errors import ConfigurationError

LONGEST_BLOCK = 2**14
"""Elements. Kernels hold a whole block in registers or in a cache; longer ones would save 0.2 % of the bytes at most."""


def check_block(block: object) -> None:
    """Raise ConfigurationError unless whole bytes hold the codes of a block, and kernels the block."""
    if not is_whole(block, 8, LONGEST_BLOCK) or block % 8:
        raise ConfigurationError(f"block must be a multiple of 8 elements, from 8 to {LONGEST_BLOCK}; got {block!r}")


def in_blocks(tensor: Tensor, block: int, fill: float = 0.0) -> Tensor:
    """``[blocks, block]``: a flat tensor, the last row filled up; a view where there is nothing to fill up."""
    missing = -tensor.numel() % block
    return (pad(tensor, (0, missing), value=fill) if missing else tensor).view(-1, block)


def smallest(tensor: Tensor, block: int) -> Tensor:
    """Each element's block's smallest value, like ``tensor``."""
    return in_blocks(tensor, block, float("inf")).amin(1).repeat_interleave(block)[: tensor.numel()]


def largest(tensor: Tensor, block: int) -> Tensor:
    """Each element's block's largest value, like ``tensor``."""
    return -smallest(-tensor, block)


def mean_size(tensor: Tensor, block: int) -> Tensor:
    """Each element's block's mean absolute value, like ``tensor``."""
    one = torch.ones_like(tensor)
    total, count = (in_blocks(t, block).sum(1) for t in (tensor.abs(), one))
    return (total / count).repeat_interleave(block)[: tensor.numel()]


def rounding_of(size: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of one rounding of values as large as ``size`` to ``dtype`` by way of fp32; inf where that overflows."""
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    return torch.where(size * (1 + info.eps) > info.max, float("inf"), size * info.eps + info.smallest_normal * info.eps)


def finite_or(rest: Tensor, residual: Tensor | None) -> Tensor:
    """``rest``, and where that is not finite, the residual as it was."""
    return torch.where(rest.isfinite(), rest, 0.0 if residual is None else residual)
