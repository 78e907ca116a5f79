"""CPU kernels: entry points on tensors; the loops are compiled by numba at their first use (and kept on disk)."""

import numpy as np
from torch import Tensor

from gossamer.codecs.kernels.cpu_numba import Array
from gossamer.codecs.kernels.cpu_quantize import dequantize_all, quantize_all
from gossamer.codecs.kernels.cpu_sign import accumulate_all, norms_all, sign_all, unsign_all
from gossamer.codecs.kernels.layout import Blocks, Grid, keys

NOTHING = np.empty(0, np.float32)


def array(tensor: Tensor | None) -> Array:
    """The tensor's memory as an array; an empty one for None."""
    return NOTHING if tensor is None else tensor.detach().numpy()


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = map(array, grid.split(payload, x.numel()))
    key1, key2 = map(np.uint32, keys(seed))
    shape = (grid.block, grid.bits, np.float32(grid.inverse), grid.top, grid.stochastic, key1, key2)
    quantize_all(array(x), array(residual), header, packed, array(rest), *shape)


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    header, packed = map(array, grid.split(payload, out.numel()))
    dequantize_all(header, packed, array(out), grid.block, grid.bits, np.float32(grid.top // 2), add)


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = map(array, blocks.split(payload, x.numel()))
    sign_all(array(x), array(residual), header, packed, array(rest), blocks.block)


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    header, packed = map(array, blocks.split(payload, out.numel()))
    unsign_all(header, packed, array(out), blocks.block, add)


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    norms = x.new_empty(-(-x.numel() // chunk))
    norms_all(array(x), array(residual), array(norms), chunk)
    return norms


def accumulate(x: Tensor, residual: Tensor, chunk: int) -> Tensor:
    norms = x.new_empty(-(-x.numel() // chunk))
    accumulate_all(array(x), array(residual), array(norms), chunk)
    return norms
