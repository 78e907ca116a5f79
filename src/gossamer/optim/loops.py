"""Loops: an optimizer's update of one tensor on the CPU, in one pass over memory; compiled by numba at its first use."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

Array = npt.NDArray[Any]


@njit(nogil=True, cache=True, error_model="numpy")  # a test for a divisor of 0 would keep it from being vectorised
def adamw(
    weight: Array,
    gradient: Array,
    mean: Array,
    square: Array,
    lag: Any,
    forget: Any,
    share: Any,
    rest: Any,
    keep: Any,
    rate: Any,
    eps: Any,
    first: Any,
    second: Any,
) -> None:
    """mean ← mean + lag·(gradient − mean); step = mean·first; square ← forget·square + share·gradient² + rest·step²;
    weight ← keep·weight − rate·step/(√(square·second) + eps)."""
    for i in range(weight.size):
        mean[i] += lag * (gradient[i] - mean[i])
        step = mean[i] * first
        square[i] = forget * square[i] + share * gradient[i] * gradient[i] + rest * step * step
        weight[i] = keep * weight[i] - rate * step / (np.sqrt(square[i] * second) + eps)
