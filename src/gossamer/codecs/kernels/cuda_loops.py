"""Triton loops: one block (or chunk) per program, its elements as [plane, byte]."""

import triton
import triton.language as tl

from gossamer.codecs.kernels import layout

MIX1, MIX2 = tl.constexpr(layout.M1), tl.constexpr(layout.M2)
SHIFT1, SHIFT2 = tl.constexpr(layout.SHIFT1), tl.constexpr(layout.SHIFT2)
HUGE, TINY, UP = tl.constexpr(layout.HUGE), tl.constexpr(layout.TINY), tl.constexpr(2.0**64)
SHRINK, WEYL = tl.constexpr(layout.SHRINK), tl.constexpr(layout.WEYL)


@triton.jit
def place_of_block(b, numel, block: tl.constexpr, bits: tl.constexpr, planes: tl.constexpr, width: tl.constexpr):
    """First element, and for each [plane, byte] the element's place in the block, and whether it exists."""
    start = b.to(tl.int64) * block
    length = tl.minimum(numel - start, block).to(tl.int32)
    m = (length * bits + 7) // 8
    byte = tl.arange(0, width)[None, :]
    place = tl.arange(0, planes)[:, None] * m + byte
    return start, m, place, (byte < m) & (place < length)


# Tensors of bfloat16 come as their bits, int16. A residual may be one, and so may what remains.


@triton.jit
def load_number(pointer, here):
    """Elements of fp32 or bfloat16, as fp32; 0 where there is none."""
    if pointer.dtype.element_ty == tl.int16:
        number = (tl.load(pointer, mask=here, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        number = tl.load(pointer, mask=here, other=0.0)
    return number


@triton.jit
def keep(pointer, number, index, noise, here):
    """Write fp32 as it is, or as the bfloat16 number below or above: see ``narrow`` of the reference."""
    if pointer.dtype.element_ty == tl.int16:
        bits = number.to(tl.int32, bitcast=True)
        size = bits & 0x7FFFFFFF
        moved = index.to(tl.uint32) * tl.full((), WEYL, tl.uint32) + noise.to(tl.uint32)
        rounded = tl.minimum(size + (moved >> 16).to(tl.int32), 0x7F7FFFFF) >> 16
        magnitude = tl.where(size < 0x7F800000, rounded, 0x7FC0)
        tl.store(pointer, (magnitude | ((bits >> 16) & -0x8000)).to(tl.int16), mask=here)
    else:
        tl.store(pointer, number, mask=here)


@triton.jit
def load_wanted(x, residual, start, place, here, has_residual: tl.constexpr):
    """x + residual, 0 where there is no element."""
    wanted = tl.load(x + start + place, mask=here, other=0.0)
    if has_residual:
        wanted += load_number(residual + start + place, here)
    return wanted


@triton.jit
def store_rest(rest, residual, start, place, here, values, finite, noise, has_residual: tl.constexpr):
    """The rest of a finite block; of another, the residual as it was."""
    old = tl.zeros_like(values)
    if has_residual:
        old = load_number(residual + start + place, here)
    keep(rest + start + place, tl.where(finite, values, old), start + place, noise, here)


@triton.jit
def uniform(first, place, key1, key2):
    """[0, 1) from a hash of the seed's keys and the element's index."""
    mixed = (first + place).to(tl.uint32) ^ key1.to(tl.uint32)
    mixed = (mixed ^ (mixed >> SHIFT1)) * tl.full((), MIX1, tl.uint32) + key2.to(tl.uint32)
    mixed = (mixed ^ (mixed >> SHIFT2)) * tl.full((), MIX2, tl.uint32)
    return ((mixed ^ (mixed >> 16)) >> 8).to(tl.int32).to(tl.float32) * (1.0 / 16777216.0)


@triton.jit
def steps(lo, hi, inverse: tl.constexpr):
    """Half a step, and the factors (up, inv) so that (w·up − lo·up)·inv is the place on the grid, whatever the range.

    On a symmetric grid it is w·up·inv + middle: the middle itself for 0, which no rounding may let chance move.
    """
    reach = hi * 0.5 - lo * 0.5
    half = reach * inverse + 0.0
    up = tl.where(reach > HUGE, 0.25, tl.where(reach < TINY, UP, 1.0))
    up = tl.where(half == 0.0, 1.0, up)
    inv = tl.where(half == 0.0, 0.0, tl.div_rn(1.0, tl.where(half == 0.0, 1.0, half * 2.0 * up)))
    return half, up, inv


@triton.jit
def extremes(wanted, here):
    """Whether a block is finite, its smallest and its largest value."""
    size = tl.abs(wanted)
    bad = ((size != size) | (size == float("inf"))).to(tl.int32)
    lo = tl.min(tl.min(tl.where(here, wanted, float("inf")), axis=1), axis=0) + 0.0
    hi = tl.max(tl.max(tl.where(here, wanted, float("-inf")), axis=1), axis=0)
    return tl.max(tl.max(bad, axis=1), axis=0) == 0, lo, hi


@triton.jit
def store_codes(packed, start, m, codes, bits: tl.constexpr, planes: tl.constexpr, width: tl.constexpr):
    """Planes of codes (0 where there is no element) into bytes."""
    byte = tl.arange(0, width)
    together = tl.sum(codes << (tl.arange(0, planes)[:, None] * bits), axis=0)
    tl.store(packed + (start * bits) // 8 + byte, together.to(tl.uint8), mask=byte < m)


@triton.jit
def load_codes(packed, start, m, bits: tl.constexpr, planes: tl.constexpr, width: tl.constexpr):
    """The codes of each [plane, byte]."""
    byte = tl.arange(0, width)[None, :]
    together = tl.load(packed + (start * bits) // 8 + byte, mask=byte < m, other=0).to(tl.int32)
    return (together >> (tl.arange(0, planes)[:, None] * bits)) & ((1 << bits) - 1)


@triton.jit(do_not_specialize=["key1", "key2", "noise"])
def quantize_kernel(
    x,
    residual,
    header,
    packed,
    rest,
    numel,
    key1,
    key2,
    noise,
    count,
    inverse: tl.constexpr,
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
    """Header, codes and rest of a block of ``x + residual``."""
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, bits, planes, width)
    wanted = load_wanted(x, residual, start, place, here, has_residual)
    finite, lo, hi = extremes(wanted, here)
    if symmetric:
        hi = tl.maximum(-lo, hi)
        lo = -hi
    half, up, inv = steps(lo, hi, inverse)
    if symmetric:
        lo = -(half * 2.0 * (top // 2))
        tl.store(header + b, tl.where(finite, half * 2.0, float("nan")))
        level = wanted * up * inv + (top // 2)
    else:
        tl.store(header + b, tl.where(finite, lo, float("nan")))
        tl.store(header + count + b, tl.where(finite, half, float("nan")))
        level = (wanted * up - lo * up) * inv
    level = tl.minimum(tl.maximum(level, 0.0), top)
    level = tl.where(here & finite, level, 0.0)
    if stochastic:
        below = level.to(tl.int32)
        chance = uniform(start, place, key1, key2)
        codes = below + (chance < level - below.to(tl.float32)).to(tl.int32)
    else:
        codes = (level + 0.5).to(tl.int32)
    codes = tl.where(here, codes, 0)
    store_codes(packed, start, m, codes, bits, planes, width)
    if has_rest:
        part = codes.to(tl.float32) * half
        store_rest(rest, residual, start, place, here, wanted - ((lo + part) + part), finite, noise, has_residual)


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
    """The values of a block, written or added to ``out``."""
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, bits, planes, width)
    lo = tl.load(header + b)
    if symmetric:
        half = lo * 0.5
        lo = -(lo * (top // 2))
    else:
        half = tl.load(header + count + b)
    part = load_codes(packed, start, m, bits, planes, width).to(tl.float32) * half
    values = (lo + part) + part
    if add:
        values += tl.load(out + start + place, mask=here, other=0.0)
    tl.store(out + start + place, values, mask=here)


@triton.jit(do_not_specialize=["noise"])
def sign_kernel(
    x,
    residual,
    header,
    packed,
    rest,
    numel,
    noise,
    block: tl.constexpr,
    width: tl.constexpr,
    has_residual: tl.constexpr,
    has_rest: tl.constexpr,
):
    """Mean size, signs and rest of a block of ``x + residual``."""
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, 1, 8, width)
    wanted = load_wanted(x, residual, start, place, here, has_residual)
    length = tl.minimum(numel - start, block).to(tl.float32)
    size = tl.sum(tl.sum(tl.abs(wanted), axis=1), axis=0) * tl.div_rn(1.0, length)
    careful = tl.sum(tl.sum(tl.abs(wanted) * tl.div_rn(SHRINK, length), axis=1), axis=0)
    size = tl.where(size < float("inf"), size, careful)
    finite = size < float("inf")
    size = tl.where(finite, size, float("nan"))
    tl.store(header + b, size)
    negative = here & (wanted < 0.0)
    store_codes(packed, start, m, negative.to(tl.int32), 1, 8, width)
    if has_rest:
        values = wanted - tl.where(negative, -size, size)
        store_rest(rest, residual, start, place, here, values, finite, noise, has_residual)


@triton.jit
def unsign_kernel(header, packed, out, numel, block: tl.constexpr, width: tl.constexpr, add: tl.constexpr):
    """The values of a block of signs, written or added to ``out``."""
    b = tl.program_id(0)
    start, m, place, here = place_of_block(b, numel, block, 1, 8, width)
    size = tl.load(header + b)
    negative = load_codes(packed, start, m, 1, 8, width) != 0
    values = tl.where(negative, -size, size)
    if add:
        values += tl.load(out + start + place, mask=here, other=0.0)
    tl.store(out + start + place, values, mask=here)


@triton.jit(do_not_specialize=["noise"])
def norms_kernel(
    x, residual, norms, out, numel, noise, chunk, tile: tl.constexpr, has_residual: tl.constexpr, adds: tl.constexpr
):
    """Sum of |x + residual| over a chunk. If it ``adds``: x + residual into ``out``, and the sum is of |x + residual + x|."""
    c = tl.program_id(0)
    start = c.to(tl.int64) * chunk
    length = tl.minimum(numel - start, chunk).to(tl.int32)
    total = tl.zeros((tile,), tl.float32)
    for at in range(0, length, tile):
        place = at + tl.arange(0, tile)
        here = place < length
        value = load_wanted(x, residual, start, place, here, has_residual)
        if adds:
            before = tl.load(x + start + place, mask=here, other=0.0)
            keep(out + start + place, value, start + place, noise, here)
            value += before
        total += tl.abs(value)
    tl.store(norms + c, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["noise"])
def narrow_kernel(values, out, numel, noise, tile: tl.constexpr):
    """The values, with fewer bits if ``out`` has fewer."""
    place = tl.program_id(0).to(tl.int64) * tile + tl.arange(0, tile)
    here = place < numel
    keep(out + place, tl.load(values + place, mask=here, other=0.0), place, noise, here)
