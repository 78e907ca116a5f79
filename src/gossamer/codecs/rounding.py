"""Rounding: what block-wise codecs share: checks of a block, block-wise extremes, the error of a dtype."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.checks import is_whole
from gossamer.errors import ConfigurationError


def check_block(block: object) -> None:
    """Raise ConfigurationError unless whole bytes hold the codes of a block."""
    if not is_whole(block, 8) or block % 8:
        raise ConfigurationError(f"block must be a positive multiple of 8 elements; got {block!r}")


def by_block(tensor: Tensor, block: int, fill: float) -> Tensor:
    """``[blocks, block]``, the last row filled up."""
    return pad(tensor, (0, -tensor.numel() % block), value=fill).view(-1, block)


def smallest(tensor: Tensor, block: int) -> Tensor:
    """Each element's block's smallest value, like ``tensor``."""
    return by_block(tensor, block, float("inf")).amin(1).repeat_interleave(block)[: tensor.numel()]


def mean_size(tensor: Tensor, block: int) -> Tensor:
    """Each element's block's mean absolute value, like ``tensor``."""
    one = torch.ones_like(tensor)
    total, count = (by_block(t, block, 0.0).sum(1) for t in (tensor.abs(), one))
    return (total / count).repeat_interleave(block)[: tensor.numel()]


def rounding_of(size: Tensor, dtype: torch.dtype) -> Tensor:
    """The error of one rounding of values as large as ``size`` to ``dtype`` by way of fp32; inf where that overflows."""
    info = torch.finfo(torch.float32 if dtype == torch.float64 else dtype)
    return torch.where(size * (1 + info.eps) > info.max, float("inf"), size * info.eps + info.smallest_normal * info.eps)
