"""Quantisation loops for the CPU: two passes per block while it is in cache, each without a branch inside."""

from typing import Any

import numpy as np

from gossamer.codecs.kernels.cpu_numba import INF_KEY, Array, exact, keep, moved_on, number, order, value_of
from gossamer.codecs.kernels.layout import HUGE, M1, M2, SHIFT1, SHIFT2, TINY

F32, I32, U32, U8 = np.float32, np.int32, np.uint32, np.uint8


@exact
def take(x: Array, residual: Array, wanted: Array) -> tuple[Any, Any]:
    """wanted = x + residual, and the smallest and largest key in it. (Two loops: a test inside would not vectorise.)"""
    low, high = I32(0x7FFFFFFF), I32(-0x80000000)
    if residual.size:
        for i in range(x.size):
            wanted[i] = x[i] + number(residual[i])
            key = order(wanted[i])
            low, high = min(low, key), max(high, key)
    else:
        for i in range(x.size):
            wanted[i] = x[i]
            key = order(wanted[i])
            low, high = min(low, key), max(high, key)
    return low, high


@exact
def steps(lo: Any, hi: Any, inverse: Any) -> tuple[Any, Any, Any]:
    """Half a step, and the factors (up, inv) so that (w·up − lo·up)·inv is the place on the grid, whatever the range.

    On a symmetric grid it is w·up·inv + middle: the middle itself for 0, which no rounding may let chance move.
    """
    reach = hi * F32(0.5) - lo * F32(0.5)
    half = reach * inverse + F32(0)  # −0 becomes 0
    if half == F32(0):
        return half, F32(1), F32(0)
    up = F32(0.25) if reach > F32(HUGE) else F32(2.0**64) if reach < F32(TINY) else F32(1)
    return half, up, F32(1) / (half * F32(2) * up)


@exact
def place_nearest(wanted: Array, codes: Array, origin: Any, start: Any, up: Any, inv: Any, top: Any) -> None:
    """Codes of the nearest levels, counted from the value ``origin``, which stands at ``start``."""
    base = origin * up
    for i in range(wanted.size):
        place = (wanted[i] * up - base) * inv + start
        place = min(max(place, F32(0)), top)
        codes[i] = U8(I32(place + F32(0.5)))


@exact
def place_stochastic(
    wanted: Array, codes: Array, origin: Any, start: Any, up: Any, inv: Any, top: Any, first: Any, key1: Any, key2: Any
) -> None:
    """Codes of the level below or above, at random: the mean is the value. (numba widens integers: hence the casts.)"""
    base = origin * up
    for i in range(wanted.size):
        place = (wanted[i] * up - base) * inv + start
        place = min(max(place, F32(0)), top)
        below = I32(place)
        mixed = U32(first + U32(i)) ^ key1
        mixed = U32(U32(mixed ^ U32(mixed >> U32(SHIFT1))) * U32(M1))
        mixed = U32(mixed + key2)
        mixed = U32(U32(mixed ^ U32(mixed >> U32(SHIFT2))) * U32(M2))
        chance = F32(I32(U32(mixed ^ U32(mixed >> U32(16))) >> U32(8))) * F32(2.0**-24)
        codes[i] = U8(below + I32(chance < place - F32(below)))


@exact
def keep_rest(wanted: Array, codes: Array, rest: Array, lo: Any, half: Any, noise: Any) -> None:
    """rest = wanted − what decoding will give, to the bit, if it is fp32."""
    for i in range(wanted.size):
        part = F32(codes[i]) * half
        keep(rest, i, wanted[i] - ((lo + part) + part), noise)


@exact
def keep_old(residual: Array, rest: Array, noise: Any) -> None:
    """A block that is not finite: the residual stays as it was."""
    if residual.size:
        for i in range(rest.size):
            keep(rest, i, number(residual[i]), noise)
    else:
        rest[:] = 0


@exact
def pack(codes: Array, out: Array, bits: int) -> None:
    """Planes of ``out.size`` codes into bytes."""
    m = out.size
    if bits == 8:
        for j in range(m):
            out[j] = codes[j]
    elif bits == 4:
        for j in range(m):
            out[j] = U8(codes[j] | U8(codes[j + m] << 4))
    else:
        for j in range(m):
            out[j] = U8(codes[j] | U8(codes[j + m] << 2) | U8(codes[j + 2 * m] << 4) | U8(codes[j + 3 * m] << 6))


@exact
def unpack(packed: Array, out: Array, lo: Any, half: Any, shift: Any, mask: Any, add: bool) -> None:
    """One plane of codes to values, or added to values."""
    if add:
        for j in range(out.size):
            part = F32(U8(packed[j] >> shift) & mask) * half
            out[j] += (lo + part) + part
    else:
        for j in range(out.size):
            part = F32(U8(packed[j] >> shift) & mask) * half
            out[j] = (lo + part) + part


@exact
def grid_of(low: Any, high: Any, symmetric: bool, inverse: Any, middle: Any) -> tuple[bool, Any, Any, Any, Any]:
    """Whether a block is finite, its lowest level, half a step, and the factors of :func:`steps`."""
    if low <= -INF_KEY - 1 or high >= INF_KEY:
        return False, F32(np.nan), F32(np.nan), F32(1), F32(0)
    lo, hi = value_of(low) + F32(0), value_of(high)  # −0 becomes 0
    if symmetric:
        hi = max(abs(lo), abs(hi))
        half, up, inv = steps(-hi, hi, inverse)
        return True, -(half * F32(2) * middle), half, up, inv
    half, up, inv = steps(lo, hi, inverse)
    return True, lo, half, up, inv


@exact
def quantize_all(
    x: Array,
    residual: Array,
    header: Array,
    packed: Array,
    rest: Array,
    block: int,
    bits: int,
    inverse: Any,
    top: int,
    stochastic: bool,
    key1: Any,
    key2: Any,
    noise: Any,
) -> None:
    """Header, codes and rest of ``x + residual``; an empty residual or rest is none."""
    room = min(block, x.size)
    wanted, codes = np.empty(room, F32), np.zeros(room + 8, U8)
    symmetric, middle = header.shape[0] == 1, F32(top // 2)
    for b in range(header.shape[1]):
        begin, end = b * block, min((b + 1) * block, x.size)
        r = residual[begin:end] if residual.size else residual
        w, c = wanted[: end - begin], codes[: end - begin]
        low, high = take(x[begin:end], r, w)
        finite, lo, half, up, inv = grid_of(low, high, symmetric, inverse, middle)
        origin, start = (F32(0), middle) if symmetric else (lo, F32(0))  # to take 0 away, or to add it, changes no bit
        header[0, b] = half * F32(2) if symmetric else lo
        if not symmetric:
            header[1, b] = half
        if not finite:
            c[:] = 0
        elif stochastic:
            place_stochastic(w, c, origin, start, up, inv, F32(top), U32(begin), key1, key2)
        else:
            place_nearest(w, c, origin, start, up, inv, F32(top))
        if rest.size and finite:
            keep_rest(w, c, rest[begin:end], lo, half, moved_on(noise, begin))
        elif rest.size:
            keep_old(r, rest[begin:end], moved_on(noise, begin))
        codes[end - begin :] = 0
        pack(codes, packed[begin * bits // 8 : (end * bits + 7) // 8], bits)


@exact
def dequantize_all(header: Array, packed: Array, out: Array, block: int, bits: int, middle: Any, add: bool) -> None:
    """Values from a payload, written or added to ``out``."""
    symmetric, mask = header.shape[0] == 1, U8((1 << bits) - 1)
    for b in range(header.shape[1]):
        begin, end = b * block, min((b + 1) * block, out.size)
        half = header[0, b] * F32(0.5) if symmetric else header[1, b]
        lo = -(header[0, b] * middle) if symmetric else header[0, b]
        first, last = begin * bits // 8, (end * bits + 7) // 8
        for plane in range(8 // bits):
            at = begin + plane * (last - first)
            unpack(packed[first:last], out[at : min(end, at + last - first)], lo, half, U8(plane * bits), mask, add)
