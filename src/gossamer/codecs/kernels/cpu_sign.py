"""Sign and norm loops for the CPU: sums of absolute values, sign bits in planes."""

from typing import Any

import numpy as np

from gossamer.codecs.kernels.cpu_numba import Array, exact, keep, moved_on, number, summing
from gossamer.codecs.kernels.cpu_quantize import keep_old
from gossamer.codecs.kernels.layout import SHRINK

F32, U8, U32 = np.float32, np.uint8, np.uint32


@summing
def total_size(values: Array, factor: Any) -> Any:
    """Sum of |value|·factor."""
    total = F32(0)
    for i in range(values.size):
        total += abs(values[i]) * factor
    return total


@summing
def total_size_of_both(x: Array, residual: Array) -> Any:
    """Sum of |x + residual|."""
    total = F32(0)
    for i in range(x.size):
        total += abs(x[i] + number(residual[i]))
    return total


@summing
def accumulated(x: Array, residual: Array) -> Any:
    """Add the residual to x; sum of |x after + x before|."""
    total = F32(0)
    for i in range(x.size):
        before = x[i]
        x[i] = after = before + number(residual[i])
        total += abs(after + before)
    return total


@summing
def accumulated_elsewhere(x: Array, residual: Array, out: Array, noise: Any) -> Any:
    """x + residual into ``out``, which is not x; sum of |x + residual + x|."""
    total = F32(0)
    for i in range(x.size):
        before = x[i]
        after = before + number(residual[i])
        keep(out, i, after, noise)
        total += abs(after + before)
    return total


@exact
def take(x: Array, residual: Array, wanted: Array) -> None:
    """wanted = x + residual, without −0. Not summed in the same loop: one over several arrays is compiled twice, in case
    that they overlap, and which of the two is run, so in which order it would sum, depends on where they lie."""
    if residual.size:
        for i in range(x.size):
            wanted[i] = x[i] + number(residual[i]) + F32(0)
    else:
        for i in range(x.size):
            wanted[i] = x[i] + F32(0)


@exact
def pack_signs(wanted: Array, out: Array) -> None:
    """Planes of sign bits (1: negative) into bytes."""
    m = out.size
    for j in range(m):
        byte = U8(wanted[j] < 0)
        for plane in range(1, 8):
            byte |= U8(U8(wanted[j + plane * m] < 0) << plane)
        out[j] = byte


@exact
def pack_top_bits(bits: Array, out: Array) -> None:
    """As :func:`pack_signs`, of the same values as integers, in half the time; none of them is −0 or NaN."""
    m = out.size
    for j in range(m):
        word = bits[j] >> U32(31)
        for plane in range(1, 8):
            word |= U32(U32(bits[j + plane * m] >> U32(31)) << U32(plane))
        out[j] = U8(word)


@exact
def keep_sign_rest(wanted: Array, rest: Array, size: Any, noise: Any) -> None:
    """rest = wanted − its sign times ``size``."""
    for i in range(wanted.size):
        keep(rest, i, wanted[i] - (-size if wanted[i] < 0 else size), noise)


@exact
def mean_size(wanted: Array) -> Any:
    """The mean of |wanted|; NaN if some of it is not finite."""
    size = total_size(wanted, F32(1)) * (F32(1) / F32(wanted.size))
    if not np.isfinite(size):
        size = total_size(wanted, F32(SHRINK) / F32(wanted.size))
    return size if np.isfinite(size) else F32(np.nan)


TILE = 2**14
"""Elements that are read, then written, at a time: turns between several places of the memory cost more if they are short."""


@exact
def sign_all(x: Array, residual: Array, header: Array, packed: Array, rest: Array, block: int, noise: Any) -> None:
    """Header, signs and rest of ``x + residual``; an empty residual or rest is none."""
    blocks, together = header.shape[1], max(1, TILE // block)
    scratch = np.zeros(min(together * block, x.size) + 8, F32)
    bits = scratch.view(np.uint32)
    for first in range(0, blocks, together):
        last = min(first + together, blocks)
        start, stop = first * block, min(last * block, x.size)
        take(x[start:stop], residual[start:stop] if residual.size else residual, scratch)
        scratch[stop - start :] = 0
        for b in range(first, last):
            begin, end = b * block, min((b + 1) * block, x.size)
            size = mean_size(scratch[begin - start : end - start])
            header[0, b] = size
            out = packed[begin // 8 : (end + 7) // 8]
            pack_signs(scratch[begin - start :], out) if np.isnan(size) else pack_top_bits(bits[begin - start :], out)
        for b in range(first, last if rest.size else first):
            begin, end = b * block, min((b + 1) * block, x.size)
            if np.isnan(header[0, b]):
                keep_old(residual[begin:end] if residual.size else residual, rest[begin:end], moved_on(noise, begin))
            else:
                keep_sign_rest(scratch[begin - start : end - start], rest[begin:end], header[0, b], moved_on(noise, begin))


@exact
def unpack_signs(packed: Array, out: Array, size: Any, plane: Any, add: bool) -> None:
    """One plane of signs to values, or added to values."""
    if add:
        for j in range(out.size):
            out[j] += -size if (packed[j] >> plane) & 1 else size
    else:
        for j in range(out.size):
            out[j] = -size if (packed[j] >> plane) & 1 else size


@exact
def unsign_all(header: Array, packed: Array, out: Array, block: int, add: bool) -> None:
    """Values from a payload of signs, written or added to ``out``."""
    for b in range(header.shape[1]):
        begin, end = b * block, min((b + 1) * block, out.size)
        first, last = begin // 8, (end + 7) // 8
        for plane in range(8):
            at = begin + plane * (last - first)
            unpack_signs(packed[first:last], out[at : min(end, at + last - first)], header[0, b], U8(plane), add)


@exact
def norms_all(x: Array, residual: Array, norms: Array, chunk: int) -> None:
    """Sum of |x + residual| over each chunk."""
    for c in range(norms.size):
        begin, end = c * chunk, min((c + 1) * chunk, x.size)
        norms[c] = total_size_of_both(x[begin:end], residual[begin:end]) if residual.size else total_size(x[begin:end], F32(1))


@exact
def accumulate_all(x: Array, residual: Array, norms: Array, chunk: int) -> None:
    """Add the residual to x; sum of |x after + x before| over each chunk."""
    for c in range(norms.size):
        begin, end = c * chunk, min((c + 1) * chunk, x.size)
        norms[c] = accumulated(x[begin:end], residual[begin:end])


@exact
def accumulate_elsewhere(x: Array, residual: Array, out: Array, norms: Array, chunk: int, noise: Any) -> None:
    """x + residual into ``out``, which is not x; sum of |x + residual + x| over each chunk."""
    for c in range(norms.size):
        begin, end = c * chunk, min((c + 1) * chunk, x.size)
        norms[c] = accumulated_elsewhere(x[begin:end], residual[begin:end], out[begin:end], moved_on(noise, begin))


@exact
def narrow_all(values: Array, out: Array, noise: Any) -> None:
    """The values, with fewer bits if ``out`` has fewer."""
    for i in range(values.size):
        keep(out, i, values[i], noise)
