"""Kernels for ``meta`` tensors: results of the right shape, without values and without the time that values take."""

import torch
from torch import Tensor

from gossamer.codecs.kernels.layout import Blocks, Grid
from gossamer.codecs.kernels.reference import modulo_difference, modulo_pack  # noqa: F401  (as they are)


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    """Nothing to write."""


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    """Nothing to write."""


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    """Nothing to write."""


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    """Nothing to write."""


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    """``float32[ceil(n/chunk)]``."""
    return torch.empty(-(-x.numel() // chunk), dtype=torch.float32, device="meta")


def accumulate(x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor:
    """``float32[ceil(n/chunk)]``; nothing to add."""
    return chunk_norms(x, residual, chunk)


def narrow(values: Tensor, out: Tensor, seed: int) -> None:
    """Nothing to write."""
