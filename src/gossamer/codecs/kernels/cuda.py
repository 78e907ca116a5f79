"""CUDA kernels: one block (or chunk) per program, compiled by triton at their first use.

Fused multiply-add is off (``enable_fp_fusion=False``), because decoding must give the bits that the other kernels give.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gossamer.codecs.kernels.layout import HUGE, M1, M2, SHIFT1, SHIFT2, SHRINK, TINY, Blocks, Grid, keys

TILE = 4096
"""Elements that one program of :func:`norms_kernel` reads at a time."""


@triton.jit
def place_of_block(b, numel, block: tl.constexpr, bits: tl.constexpr, planes: tl.constexpr, width: tl.constexpr):
    """First element, and for each [plane, byte] the element's place in the block, and whether it exists."""
    start = b.to(tl.int64) * block
    length = tl.minimum(numel - start, block).to(tl.int32)
    m = (length * bits + 7) // 8
    byte = tl.arange(0, width)[None, :]
    place = tl.arange(0, planes)[:, None] * m + byte
    return start, m, place, (byte < m) & (place < length)


@triton.jit
def load_wanted(x, residual, start, place, here, has_residual: tl.constexpr):
    """x + residual, 0 where there is no element."""
    wanted = tl.load(x + start + place, mask=here, other=0.0)
    if has_residual:
        wanted += tl.load(residual + start + place, mask=here, other=0.0)
    return wanted


@triton.jit
def store_rest(rest, residual, start, place, here, values, finite, has_residual: tl.constexpr):
    """The rest of a finite block; of another, the residual as it was."""
    old = tl.zeros_like(values)
    if has_residual:
        old = tl.load(residual + start + place, mask=here, other=0.0)
    tl.store(rest + start + place, tl.where(finite, values, old), mask=here)


@triton.jit
def uniform(first, place, key1, key2, m1: tl.constexpr, m2: tl.constexpr, shift1: tl.constexpr, shift2: tl.constexpr):
    """[0, 1) from a hash of the seed's keys and the element's index."""
    mixed = (first + place).to(tl.uint32) ^ key1.to(tl.uint32)
    mixed = (mixed ^ (mixed >> shift1)) * tl.full((), m1, tl.uint32) + key2.to(tl.uint32)
    mixed = (mixed ^ (mixed >> shift2)) * tl.full((), m2, tl.uint32)
    return ((mixed ^ (mixed >> 16)) >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit(do_not_specialize=["key1", "key2"])
def quantize_kernel(
    x,
    residual,
    header,
    packed,
    rest,
    numel,
    key1,
    key2,
    count,
    inverse: tl.constexpr,
    huge: tl.constexpr,
    tiny: tl.constexpr,
    m1: tl.constexpr,
    m2: tl.constexpr,
    shift1: tl.constexpr,
    shift2: tl.constexpr,
    block: tl.constexpr,
    bits: tl.constexpr,
    planes: tl.constexpr,
    width: tl.constexpr,
    top: tl.constexpr,
    symmetric: tl.constexpr,
    stochastic: tl.constexpr,
    has_residual: tl.constexpr,
    has_rest: tl.constexpr,
):
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, bits, planes, width)
    wanted = load_wanted(x, residual, start, place, here, has_residual)
    size = tl.abs(wanted)
    bad = ((size != size) | (size == float("inf"))).to(tl.int32)
    finite = tl.max(tl.max(bad, axis=1), axis=0) == 0
    lo = tl.min(tl.min(tl.where(here, wanted, float("inf")), axis=1), axis=0) + 0.0
    hi = tl.max(tl.max(tl.where(here, wanted, float("-inf")), axis=1), axis=0)
    if symmetric:
        hi = tl.maximum(-lo, hi)
        lo = -hi
    reach = hi * 0.5 - lo * 0.5
    half = reach * inverse + 0.0
    up = tl.where(reach > huge, 0.25, tl.where(reach < tiny, 18446744073709551616.0, 1.0))
    up = tl.where(half == 0.0, 1.0, up)
    inv = tl.where(half == 0.0, 0.0, tl.div_rn(1.0, tl.where(half == 0.0, 1.0, half * 2.0 * up)))
    if symmetric:
        lo = -(half * 2.0 * (top // 2))
        tl.store(header + b, tl.where(finite, half * 2.0, float("nan")))
    else:
        tl.store(header + b, tl.where(finite, lo, float("nan")))
        tl.store(header + count + b, tl.where(finite, half, float("nan")))
    level = tl.minimum(tl.maximum((wanted * up - lo * up) * inv, 0.0), top)
    level = tl.where(here & finite, level, 0.0)
    if stochastic:
        below = level.to(tl.int32)
        chance = uniform(start, place, key1, key2, m1, m2, shift1, shift2)
        codes = below + (chance < level - below.to(tl.float32)).to(tl.int32)
    else:
        codes = (level + 0.5).to(tl.int32)
    codes = tl.where(here, codes, 0)
    byte = tl.arange(0, width)
    together = tl.sum(codes << (tl.arange(0, planes)[:, None] * bits), axis=0)
    tl.store(packed + (start * bits) // 8 + byte, together.to(tl.uint8), mask=byte < m)
    if has_rest:
        part = codes.to(tl.float32) * half
        store_rest(rest, residual, start, place, here, wanted - ((lo + part) + part), finite, has_residual)


@triton.jit
def dequantize_kernel(
    header,
    packed,
    out,
    numel,
    count,
    block: tl.constexpr,
    bits: tl.constexpr,
    planes: tl.constexpr,
    width: tl.constexpr,
    top: tl.constexpr,
    symmetric: tl.constexpr,
    add: tl.constexpr,
):
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, bits, planes, width)
    lo = tl.load(header + b)
    if symmetric:
        half = lo * 0.5
        lo = -(lo * (top // 2))
    else:
        half = tl.load(header + count + b)
    byte = tl.arange(0, width)[None, :]
    bytes_ = tl.load(packed + (start * bits) // 8 + byte, mask=byte < m, other=0).to(tl.int32)
    codes = (bytes_ >> (tl.arange(0, planes)[:, None] * bits)) & ((1 << bits) - 1)
    part = codes.to(tl.float32) * half
    values = (lo + part) + part
    if add:
        values += tl.load(out + start + place, mask=here, other=0.0)
    tl.store(out + start + place, values, mask=here)


@triton.jit
def sign_kernel(
    x,
    residual,
    header,
    packed,
    rest,
    numel,
    shrink: tl.constexpr,
    block: tl.constexpr,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    has_rest: tl.constexpr,
):
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, 1, 8, width)
    wanted = load_wanted(x, residual, start, place, here, has_residual)
    length = tl.minimum(numel - start, block).to(tl.float32)
    size = tl.sum(tl.sum(tl.abs(wanted), axis=1), axis=0) * tl.div_rn(1.0, length)
    careful = tl.sum(tl.sum(tl.abs(wanted) * tl.div_rn(shrink, length), axis=1), axis=0)
    size = tl.where(size < float("inf"), size, careful)
    finite = size < float("inf")
    size = tl.where(finite, size, float("nan"))
    tl.store(header + b, size)
    negative = here & (wanted < 0.0)
    byte = tl.arange(0, width)
    together = tl.sum(negative.to(tl.int32) << tl.arange(0, 8)[:, None], axis=0)
    tl.store(packed + start // 8 + byte, together.to(tl.uint8), mask=byte < m)
    if has_rest:
        values = wanted - tl.where(negative, -size, size)
        store_rest(rest, residual, start, place, here, values, finite, has_residual)


@triton.jit
def unsign_kernel(header, packed, out, numel, block: tl.constexpr, width: tl.constexpr, add: tl.constexpr):
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, 1, 8, width)
    size = tl.load(header + b)
    byte = tl.arange(0, width)[None, :]
    bytes_ = tl.load(packed + start // 8 + byte, mask=byte < m, other=0).to(tl.int32)
    negative = ((bytes_ >> tl.arange(0, 8)[:, None]) & 1) != 0
    values = tl.where(negative, -size, size)
    if add:
        values += tl.load(out + start + place, mask=here, other=0.0)
    tl.store(out + start + place, values, mask=here)


@triton.jit
def norms_kernel(x, residual, norms, numel, chunk, tile: tl.constexpr, has_residual: tl.constexpr):
    c = tl.program_id(0)
    start = c.to(tl.int64) * chunk
    length = tl.minimum(numel - start, chunk).to(tl.int32)
    total = tl.zeros((tile,), tl.float32)
    for at in range(0, length, tile):
        place = at + tl.arange(0, tile)
        total += tl.abs(load_wanted(x, residual, start, place, place < length, has_residual))
    tl.store(norms + c, tl.sum(total, axis=0))


# -- entry points on tensors ----------------------------------------------------------------------------------------------


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


def signed(word: int) -> int:
    """The int32 of the same bits: of one type for every seed, so that nothing is compiled again."""
    return word - 2**32 if word >= 2**31 else word


def quantize(x: Tensor, residual: Tensor | None, grid: Grid, seed: int, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = grid.split(payload, x.numel())
    count = grid.count(x.numel())
    tensors = (x, x if residual is None else residual, header, packed, x if rest is None else rest)
    hashing = {"m1": M1, "m2": M2, "shift1": SHIFT1, "shift2": SHIFT2, "stochastic": grid.stochastic}
    scaling = {"inverse": grid.inverse, "huge": HUGE, "tiny": TINY}
    parts = {"has_residual": residual is not None, "has_rest": rest is not None}
    numbers = (x.numel(), *map(signed, keys(seed)), count)
    launch(quantize_kernel, x, count, *tensors, *numbers, **grid_of(grid), **hashing, **scaling, **parts)


def dequantize(payload: Tensor, out: Tensor, grid: Grid, add: bool) -> None:
    header, packed = grid.split(payload, out.numel())
    count = grid.count(out.numel())
    launch(dequantize_kernel, out, count, header, packed, out, out.numel(), count, **grid_of(grid), add=add)


def sign(x: Tensor, residual: Tensor | None, blocks: Blocks, payload: Tensor, rest: Tensor | None) -> None:
    header, packed = blocks.split(payload, x.numel())
    tensors = (x, x if residual is None else residual, header, packed, x if rest is None else rest)
    parts = {"has_residual": residual is not None, "has_rest": rest is not None, "shrink": SHRINK}
    launch(sign_kernel, x, blocks.count(x.numel()), *tensors, x.numel(), **shape_of(blocks), **parts)


def unsign(payload: Tensor, out: Tensor, blocks: Blocks, add: bool) -> None:
    header, packed = blocks.split(payload, out.numel())
    launch(unsign_kernel, out, blocks.count(out.numel()), header, packed, out, out.numel(), **shape_of(blocks), add=add)


def chunk_norms(x: Tensor, residual: Tensor | None, chunk: int) -> Tensor:
    norms = torch.empty(-(-x.numel() // chunk), dtype=torch.float32, device=x.device)
    both = (x, x if residual is None else residual)
    launch(norms_kernel, x, norms.numel(), *both, norms, x.numel(), chunk, tile=TILE, has_residual=residual is not None)
    return norms
