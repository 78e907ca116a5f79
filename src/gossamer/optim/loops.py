"""Loops: an optimizer's update on the CPU, of all tensors in one pass over memory; compiled by numba at their first use."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from gossamer.compiling import compiled, memory

Array = npt.NDArray[Any]


# A test for a divisor of 0, which Python's errors need, would keep the loop from being vectorised.
@compiled(error_model="numpy")
def adamw(addresses: Array, sizes: Array, factors: Array, rates: Any) -> None:
    """Of each tensor: mean ← mean + lag·(gradient − mean); step = mean·first; square ← forget·square + share·gradient² +
    rest·step²; weight ← keep·weight − rate·step/(√(square·second) + eps).

    ``addresses``: ``int64[4, tensors]``, where weight, gradient, mean and square lie, without gaps and of the dtype of
    ``factors``: ``[tensors, 4]``, first, second, share and rest. ``sizes``: ``int64[tensors]``, their elements. ``rates``: lag,
    forget, keep, rate and eps, of that dtype too.
    """
    lag, forget, keep, rate, eps = rates
    for k in range(sizes.size):
        weight = carray(memory(addresses[0, k]), sizes[k], factors.dtype)
        gradient = carray(memory(addresses[1, k]), sizes[k], factors.dtype)
        mean = carray(memory(addresses[2, k]), sizes[k], factors.dtype)
        square = carray(memory(addresses[3, k]), sizes[k], factors.dtype)
        first, second, share, rest = factors[k]
        for i in range(sizes[k]):
            mean[i] += lag * (gradient[i] - mean[i])
            step = mean[i] * first
            square[i] = forget * square[i] + share * gradient[i] * gradient[i] + rest * step * step
            weight[i] = keep * weight[i] - rate * step / (np.sqrt(square[i] * second) + eps)
