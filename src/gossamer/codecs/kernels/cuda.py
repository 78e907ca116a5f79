"""CUDA kernels: entry points on tensors; the loops are compiled by triton at their first use.

Fused multiply-add is off (``enable_fp_fusion=False``), because decoding must give the bits that the other kernels give.
"""

from typing import Any

import torch
import triton
from torch import Tensor

from gossamer.codecs.kernels import cuda_loops as loops
from gossamer.codecs.kernels import cuda_modulo_loops as modulo_loops
from gossamer.codecs.kernels.layout import Blocks, Grid, keys, noise_key, signed
from gossamer.codecs.kernels.reference import largest as largest  # a sort of torch's on the device

TILE = 4096
"""Elements that one program reads at a time for a chunk's norm."""


def launch(kernel: Any, like: Tensor, programs: int, *arguments: Any, **constants: Any) -> None:
    """Run ``programs`` instances on the device of ``like``."""
    if programs:
        with torch.cuda.device_of(like):
            kernel[(programs,)](*arguments, **constants, enable_fp_fusion=False)


def shape_of(blocks: Blocks) -> dict[str, int]:
    """The constants that tell a kernel how a block is laid out."""
    return {"block": blocks.block, "width": triton.next_power_of_2(blocks.code_bytes(blocks.block))}


def grid_of(grid: Grid) -> dict[str, Any]:
    """The constants of a grid."""
    return shape_of(grid) | {"bits": grid.bits, "planes": grid.planes, "top": grid.top, "symmetric": grid.symmetric}


def bits_or(tensor: Tensor | None, other: Tensor) -> Tensor:
    """The tensor, of bfloat16 its bits; the other one if there is none."""
    if tensor is None:
        return other
    return tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = grid.split(payload, x.numel())
    count = grid.count(x.numel())
    tensors = (x, bits_or(residual, x), header, packed, bits_or(rest, x))
    choice = {"inverse": grid.inverse, "stochastic": grid.stochastic}
    parts = {"has_residual": residual is not None, "has_rest": rest is not None}
    words = map(signed, (*keys(seed), noise_key(seed)))  # int32 for every seed, so that nothing is compiled again
    numbers = (x.numel(), *words, count)
    launch(loops.quantize_kernel, x, count, *tensors, *numbers, **grid_of(grid), **choice, **parts)


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    header, packed = grid.split(payload, out.numel())
    count = grid.count(out.numel())
    launch(loops.dequantize_kernel, out, count, header, packed, out, out.numel(), count, **grid_of(grid), add=add)


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = blocks.split(payload, x.numel())
    tensors = (x, bits_or(residual, x), header, packed, bits_or(rest, x))
    parts = {"has_residual": residual is not None, "has_rest": rest is not None}
    numbers = (x.numel(), signed(noise_key(seed)))
    launch(loops.sign_kernel, x, blocks.count(x.numel()), *tensors, *numbers, **shape_of(blocks), **parts)


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    header, packed = blocks.split(payload, out.numel())
    launch(loops.unsign_kernel, out, blocks.count(out.numel()), header, packed, out, out.numel(), **shape_of(blocks), add=add)


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    return _norms(x, residual, chunk, 0, None)


def accumulate(x: Tensor, residual: Tensor, chunk: int, seed: int, out: Tensor) -> Tensor:
    return _norms(x, residual, chunk, seed, out)


def _norms(x: Tensor, residual: Tensor | None, chunk: int, seed: int, out: Tensor | None) -> Tensor:
    norms = torch.empty(-(-x.numel() // chunk), dtype=torch.float32, device=x.device)
    tensors, numbers = (x, bits_or(residual, x), norms, bits_or(out, x)), (x.numel(), signed(noise_key(seed)), chunk)
    parts = {"has_residual": residual is not None, "adds": out is not None}
    launch(loops.norms_kernel, x, norms.numel(), *tensors, *numbers, tile=TILE, **parts)
    return norms


def narrow(values: Tensor, out: Tensor, seed: int) -> None:
    numbers = (values.numel(), signed(noise_key(seed)))
    launch(loops.narrow_kernel, values, -(-values.numel() // TILE), values, bits_or(out, out), *numbers, tile=TILE)


def modulo_pack(values: Tensor, steps: Tensor, bits: int, factors: Tensor, codes: Tensor, sums: Tensor) -> Tensor:
    sizes = torch.empty_like(steps)
    given = (values, 1 / steps, factors, codes, sums, sizes.view(torch.int32), values.numel())
    launch(modulo_loops.modulo_pack_kernel, values, steps.numel(), *given, **modulo_shape(bits, factors))
    return sizes


def modulo_difference(
    codes: Tensor, sums: Tensor, own: Tensor, steps: Tensor, bits: int, factors: Tensor, share: float, out: Tensor, add: bool
) -> tuple[Tensor, Tensor]:
    true, furthest = torch.empty_like(steps, dtype=torch.bool), torch.empty_like(steps)
    given = (codes, sums, own, 1 / steps, steps, factors, share, out, true.view(torch.uint8), furthest, own.numel())
    launch(modulo_loops.modulo_difference_kernel, own, steps.numel(), *given, **modulo_shape(bits, factors), add=add)
    return true, furthest


def modulo_shape(bits: int, factors: Tensor) -> dict[str, int]:
    """The constants of blocks as long as ``factors``, a power of two."""
    block = factors.numel()
    return {"block": block, "bits": bits, "planes": 8 // bits, "width": block * bits // 8}
