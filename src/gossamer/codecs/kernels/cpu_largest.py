"""CPU loop of :func:`gossamer.codecs.kernels.reference.largest`."""

import numpy as np

from gossamer.codecs.kernels.cpu_numba import Array, exact


@exact
def largest_all(x: Array, chunk: int, count: int, last: int, places: Array) -> None:
    """Fill ``places``, chunk by chunk."""
    sizes, at = np.empty(min(chunk, len(x)), np.float32), 0
    for begin in range(0, len(x), chunk):
        length = min(chunk, len(x) - begin)
        wanted = count if length == chunk else last
        for i in range(length):
            size = abs(x[begin + i])
            sizes[i] = size if size == size else np.float32(np.inf)
        least = np.partition(sizes[:length], length - wanted)[length - wanted]
        equal = wanted
        for i in range(length):
            equal -= sizes[i] > least
        for i in range(length):
            if sizes[i] > least or (sizes[i] == least and equal > 0):
                equal -= sizes[i] == least
                places[at] = i
                at += 1
