"""CPU kernels: entry points on tensors; the loops are compiled by numba at their first use (and kept on disk)."""

import numpy as np
import torch
from torch import Tensor

from gossamer.codecs.kernels.cpu_modulo import difference_all, pack_all
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


def modulo_pack(values: Tensor, steps: Tensor, bits: int, factors: Tensor, codes: Tensor, sums: Tensor) -> Tensor:
    sizes, inverse = torch.empty_like(steps), array(1 / steps)
    unsigned = [array(tensor).view(np.uint32) for tensor in (factors, sums)]
    magnitudes = array(sizes).view(np.int32)
    pack_all(array(values), array(values).view(np.int32), inverse, bits, unsigned[0], array(codes), unsigned[1], magnitudes)
    return sizes


def modulo_difference(
    codes: Tensor, sums: Tensor, own: Tensor, steps: Tensor, bits: int, factors: Tensor, share: float, out: Tensor, add: bool
) -> tuple[Tensor, Tensor]:
    true, furthest = torch.empty_like(steps, dtype=torch.bool), torch.empty_like(steps)
    inverse, unsigned = array(1 / steps), [array(tensor).view(np.uint32) for tensor in (factors, sums)]
    given = (array(codes), unsigned[1], array(own), inverse, array(steps), bits, unsigned[0])
    difference_all(*given, np.float32(share), array(out), add, array(true), array(furthest))
    return true, furthest
