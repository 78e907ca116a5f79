"""Sign and norm loops for the CPU: sums of absolute values, sign bits in planes."""

from typing import Any

import numpy as np

from gossamer.codecs.kernels.cpu_numba import Array, exact, summing
from gossamer.codecs.kernels.cpu_quantize import keep_old
from gossamer.codecs.kernels.layout import SHRINK

F32, U8 = np.float32, np.uint8


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
        total += abs(x[i] + residual[i])
    return total


@exact
def take(x: Array, residual: Array, wanted: Array) -> None:
    """wanted = x + residual. Not summed in the same loop: one over several arrays is compiled twice, in case that they
    overlap, and which of the two is run, so in which order it would sum, depends on where they lie."""
    if residual.size:
        for i in range(x.size):
            wanted[i] = x[i] + residual[i]
    else:
        for i in range(x.size):
            wanted[i] = x[i]


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
def keep_sign_rest(wanted: Array, rest: Array, size: Any) -> None:
    """rest = wanted − its sign times ``size``."""
    for i in range(wanted.size):
        rest[i] = wanted[i] - (-size if wanted[i] < 0 else size)


@exact
def sign_all(x: Array, residual: Array, header: Array, packed: Array, rest: Array, block: int) -> None:
    """Header, signs and rest of ``x + residual``; an empty residual or rest is none."""
    scratch = np.zeros(block + 8, F32)
    for b in range(header.shape[1]):
        begin, end = b * block, min((b + 1) * block, x.size)
        w = scratch[: end - begin]
        r = residual[begin:end] if residual.size else residual
        take(x[begin:end], r, w)
        size = total_size(w, F32(1)) * (F32(1) / F32(w.size))
        if not np.isfinite(size):
            size = total_size(w, F32(SHRINK) / F32(w.size))
        finite = np.isfinite(size)
        header[0, b] = size if finite else F32(np.nan)
        scratch[end - begin :] = 0
        pack_signs(scratch, packed[begin // 8 : (end + 7) // 8])
        if rest.size:
            if finite:
                keep_sign_rest(w, rest[begin:end], size)
            else:
                keep_old(r, rest[begin:end])


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
