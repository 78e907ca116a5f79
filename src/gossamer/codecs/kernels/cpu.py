"""CPU kernels: entry points on tensors; the loops are compiled by numba at their first use (and kept on disk)."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from gossamer.codecs.kernels.cpu_largest import largest_all
from gossamer.codecs.kernels.cpu_modulo import difference_all, pack_all
from gossamer.codecs.kernels.cpu_numba import Array
from gossamer.codecs.kernels.cpu_quantize import dequantize_all, quantize_all
from gossamer.codecs.kernels.cpu_sign import accumulate_all, accumulate_elsewhere, narrow_all, norms_all, sign_all, unsign_all
from gossamer.codecs.kernels.layout import Blocks, Grid, keys, noise_key

NOTHING = np.empty(0, np.float32)


def array(tensor: Tensor | None) -> Array:
    """The tensor's memory as an array, of bfloat16 the bits; an empty one for None."""
    if tensor is None:
        return NOTHING
    return (tensor.detach().view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor.detach()).numpy()


def memories(residual: Tensor | None, rest: Tensor | None) -> tuple[Array, Array]:
    """Both as arrays. One that is not there has the other's type: loops are compiled anew for each pair of types."""
    unsent, left = array(residual), array(rest)
    return (unsent if residual is not None else left[:0]), (left if rest is not None else unsent[:0])


def noise_of(seed: int) -> Any:
    """:func:`noise_key` as the loops take it."""
    return np.uint32(noise_key(seed))


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = map(array, grid.split(payload, x.numel()))
    key1, key2 = map(np.uint32, keys(seed))
    shape = (grid.block, grid.bits, np.float32(grid.inverse), grid.top, grid.stochastic, key1, key2, noise_of(seed))
    unsent, left = memories(residual, rest)
    quantize_all(array(x), unsent, header, packed, left, *shape)


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    header, packed = map(array, grid.split(payload, out.numel()))
    dequantize_all(header, packed, array(out), grid.block, grid.bits, np.float32(grid.top // 2), add)


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = map(array, blocks.split(payload, x.numel()))
    unsent, left = memories(residual, rest)
    sign_all(array(x), unsent, header, packed, left, blocks.block, noise_of(seed))


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    header, packed = map(array, blocks.split(payload, out.numel()))
    unsign_all(header, packed, array(out), blocks.block, add)


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    norms = x.new_empty(-(-x.numel() // chunk))
    norms_all(array(x), array(residual), array(norms), chunk)
    return norms


def accumulate(x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor:
    norms = x.new_empty(-(-x.numel() // chunk))
    if out.data_ptr() == x.data_ptr():
        accumulate_all(array(x), array(residual), array(norms), chunk)
    else:
        accumulate_elsewhere(array(x), array(residual), array(out), array(norms), chunk, noise_of(seed))
    return norms


def narrow(values: Tensor, out: Tensor, seed: int) -> None:
    narrow_all(array(values), array(out), noise_of(seed))


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


def largest(x: Tensor, chunk: int, count: int, last: int) -> Tensor:
    places = torch.empty(x.numel() // chunk * count + last, dtype=torch.int16)
    largest_all(array(x), chunk, count, last, array(places))
    return places
