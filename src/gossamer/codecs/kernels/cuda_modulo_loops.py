"""Triton loops of the modulo codec: one block per program, its elements as [plane, byte]."""

import triton
import triton.language as tl

from gossamer.codecs.kernels.cuda_loops import load_codes, store_codes


@triton.jit
def places_of(values, inverse):
    """The nearest whole numbers of steps, half-way to the even one."""
    wanted = values * inverse
    below = tl.floor(wanted)
    over = wanted - below
    odd = below - 2.0 * tl.floor(below * 0.5)
    up = (over > 0.5) | ((over == 0.5) & (odd == 1.0))
    return tl.where(up, below + 1.0, below).to(tl.int32)


@triton.jit
def sum_of_both(tensor):
    """Over both dimensions."""
    return tl.sum(tl.sum(tensor, axis=1), axis=0)


@triton.jit
def modulo_pack_kernel(
    values, inverse, factors, codes, sums, sizes, numel,
    block: tl.constexpr, bits: tl.constexpr, planes: tl.constexpr, width: tl.constexpr,
):  # fmt: skip
    """The last bits of each value's place, the checksum of the places, and the largest magnitude."""
    b = tl.program_id(0)
    start = b.to(tl.int64) * block
    place = tl.arange(0, planes)[:, None] * width + tl.arange(0, width)[None, :]
    value = tl.load(values + start + place, mask=start + place < numel, other=0.0)
    there = places_of(value, tl.load(inverse + b))
    store_codes(codes, start, width, there & ((1 << bits) - 1), bits, planes, width)
    tl.store(sums + b, sum_of_both(there * tl.load(factors + place)))
    # Without the sign the bits of numbers are ordered as the numbers are, NaN last.
    size = value.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    tl.store(sizes + b, tl.max(tl.max(size, axis=1), axis=0))


@triton.jit
def modulo_difference_kernel(
    codes, sums, own, inverse, steps, factors, share, out, true, furthest, numel,
    block: tl.constexpr, bits: tl.constexpr, planes: tl.constexpr, width: tl.constexpr, add: tl.constexpr,
):  # fmt: skip
    """The way from each own place to the nearest one with the sender's last bits; whether these are the sender's places."""
    b = tl.program_id(0)
    start = b.to(tl.int64) * block
    place = tl.arange(0, planes)[:, None] * width + tl.arange(0, width)[None, :]
    here = start + place < numel
    step, half = tl.load(steps + b), 1 << (bits - 1)
    mine = places_of(tl.load(own + start + place, mask=here, other=0.0), tl.load(inverse + b))
    code = load_codes(codes, start, width, bits, planes, width)
    ahead = ((code - mine + half) & ((1 << bits) - 1)) - half
    same = sum_of_both((mine + ahead) * tl.load(factors + place)) == tl.load(sums + b)
    tl.store(true + b, same.to(tl.uint8))
    tl.store(furthest + b, tl.max(tl.max(tl.abs(ahead), axis=1), axis=0).to(tl.float32) * step)
    way = ahead.to(tl.float32) * step * share
    if add:
        way += tl.load(out + start + place, mask=here, other=0.0)
    tl.store(out + start + place, way, mask=here)
