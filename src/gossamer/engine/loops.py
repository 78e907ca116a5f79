"""Loops: what an exchange brings is added to weights on the CPU in one pass; compiled by numba at their first use."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from gossamer.compiling import compiled, from_bf16, memory

Array = npt.NDArray[Any]


@compiled()
def add_difference(addresses: Array, offsets: Array, sizes: Array, theirs: Array, mine: Array, share: Any) -> None:
    """weight ← weight + share·(theirs − mine), all of one type.

    ``addresses``, ``offsets``, ``sizes``: ``int64[tensors]``, where each weight lies, without gaps, where its part of the
    messages begins, and how many elements it has.
    """
    for k in range(sizes.size):
        weight = carray(memory(addresses[k]), sizes[k], theirs.dtype)
        there, here = theirs[offsets[k] : offsets[k] + sizes[k]], mine[offsets[k] : offsets[k] + sizes[k]]
        for i in range(sizes[k]):
            weight[i] += share * (there[i] - here[i])


@compiled()
def add_bf16_difference(addresses: Array, offsets: Array, sizes: Array, theirs: Array, mine: Array, share: Any) -> None:
    """The same for weights in float32; ``theirs``, ``mine``: ``int16``, the bits of bfloat16 numbers, which are the upper half
    of those of a float32 number."""
    for k in range(sizes.size):
        weight = carray(memory(addresses[k]), sizes[k], np.float32)
        there, here = theirs[offsets[k] : offsets[k] + sizes[k]], mine[offsets[k] : offsets[k] + sizes[k]]
        for i in range(sizes[k]):
            weight[i] += share * (from_bf16(there[i]) - from_bf16(here[i]))
