"""Modulo loops for the CPU: places on a grid, their last bits, and a checksum of each block."""

from typing import Any

import numpy as np

from gossamer.codecs.kernels.cpu_numba import Array, exact

I32, U8, U32, F32 = np.int32, np.uint8, np.uint32, np.float32


@exact
def places_of(values: Array, inverse: Any, places: Array) -> None:
    """The nearest whole number of steps; 0 where the last block has no values."""
    for i in range(values.size):
        places[i] = I32(np.rint(values[i] * inverse))
    places[values.size :] = 0


@exact
def checksum_of(places: Array, factors: Array) -> Any:
    """Sum of place times factor, both as 32 bits, which wrap around."""
    total = U32(0)
    for i in range(places.size):
        total = U32(total + U32(U32(places[i]) * factors[i]))
    return total


@exact
def fold(places: Array, bits: int, out: Array) -> None:
    """The last bits of the places: planes into bytes."""
    m = out.size
    if bits == 8:
        for j in range(m):
            out[j] = U8(places[j] & I32(255))
    else:
        for j in range(m):
            out[j] = U8((places[j] & I32(15)) | ((places[j + m] & I32(15)) << I32(4)))


@exact
def largest(bits: Array) -> Any:
    """The largest magnitude of float32 numbers, bits for bits: without the sign they are ordered as integers are, NaN last."""
    most = I32(0)
    for i in range(bits.size):
        most = max(most, I32(bits[i] & I32(0x7FFFFFFF)))
    return most


@exact
def turn(code: Array, shift: Any, half: Any, places: Array, ahead: Array) -> Any:
    """One plane of codes: the way from each place to the nearest with these last bits, which is added to the place. Returns
    the longest."""
    longest, mask = I32(0), I32(2 * half - 1)
    for j in range(code.size):
        last = I32(I32(code[j]) >> shift)
        ahead[j] = way = I32(I32(I32(I32(last - places[j]) + half) & mask) - half)
        places[j] = I32(places[j] + way)
        longest = max(longest, abs(way))
    return longest


@exact
def go(ahead: Array, step: Any, share: Any, out: Array, add: bool) -> None:
    """The ways in whole steps, times the step and a share."""
    if add:
        for i in range(out.size):
            out[i] += F32(ahead[i]) * step * share
    else:
        for i in range(out.size):
            out[i] = F32(ahead[i]) * step * share


@exact
def pack_all(
    values: Array, shown: Array, inverse: Array, bits: int, factors: Array, codes: Array, sums: Array, sizes: Array
) -> None:
    """Codes, checksums and largest magnitudes of all blocks; ``shown``, ``sizes``: the bits of float32 numbers."""
    block = factors.size
    places = np.empty(block, np.int32)
    for b in range(inverse.size):
        begin, end = b * block, min((b + 1) * block, values.size)
        places_of(values[begin:end], inverse[b], places)
        fold(places, bits, codes[b])
        sums[b] = checksum_of(places, factors)
        sizes[b] = largest(shown[begin:end])


@exact
def difference_all(
    codes: Array, sums: Array, own: Array, inverse: Array, steps: Array, bits: int, factors: Array, share: Any, out: Array,
    add: bool, true: Array, furthest: Array,
) -> None:  # fmt: skip
    """Of all blocks: the way to the sender's values, which ones were understood, and the longest way. A block of ``own`` is
    read before it is written to ``out``."""
    block, m, half = factors.size, codes.shape[1], I32(2 ** (bits - 1))
    places, ahead = np.empty(block, np.int32), np.empty(block, np.int32)
    for b in range(inverse.size):
        begin, end = b * block, min((b + 1) * block, own.size)
        places_of(own[begin:end], inverse[b], places)
        longest = I32(0)
        for plane in range(8 // bits):
            mine = slice(plane * m, (plane + 1) * m)
            longest = max(longest, turn(codes[b], I32(plane * bits), half, places[mine], ahead[mine]))
        furthest[b] = F32(longest) * steps[b]
        true[b] = checksum_of(places, factors) == sums[b]
        go(ahead, steps[b], share, out[begin:end], add)
