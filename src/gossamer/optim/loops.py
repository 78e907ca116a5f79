"""Loops: an optimizer's update on the CPU, of all tensors in one pass over memory; compiled by numba at their first use."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba.np.numpy_support import carray

from gossamer.compiling import compiled, from_bf16, memory, to_bf16

Array = npt.NDArray[Any]

BLOCK = 2048
"""Elements of a weight after which what comes before an update, and after it, follows: all of them are in the nearest cache."""


# A test for a divisor of 0, which Python's errors need, would keep a loop from being vectorised.
@compiled(error_model="numpy")
def adamw(
    addresses: Array,
    sizes: Array,
    factors: Array,
    rates: Any,
    first: Array,
    last: Array,
    rows: Array,
    numbers: Array,
) -> None:
    """Of each tensor: mean ← mean + lag·(gradient − mean); step = mean·first; square ← forget·square + share·gradient² +
    rest·step²; weight ← keep·weight − rate·step/(√(square·second) + eps).

    ``addresses``: ``int64[4, tensors]``, where weight, gradient, mean and square lie, without gaps and of the dtype of
    ``factors``: ``[tensors, 4]``, first, second, share and rest. ``sizes``: ``int64[tensors]``, their elements. ``rates``: lag,
    forget, keep, rate and eps, of that dtype too. The last four: what is done to weights besides
    (:class:`gossamer.optim.carrying.Legs`).
    """
    before = np.empty(BLOCK, factors.dtype)
    for k in range(sizes.size):
        weight = carray(memory(addresses[0, k]), sizes[k], factors.dtype)
        gradient = carray(memory(addresses[1, k]), sizes[k], factors.dtype)
        mean = carray(memory(addresses[2, k]), sizes[k], factors.dtype)
        square = carray(memory(addresses[3, k]), sizes[k], factors.dtype)
        done = 0
        for row in range(first[k], last[k]):
            start, count, theirs, mine, message = rows[row]
            share, by = numbers[row]
            part = slice(done, start)
            _update(weight[part], gradient[part], mean[part], square[part], factors[k], rates)
            done = start + count
            for begin in range(start, done, BLOCK):
                end = min(begin + BLOCK, done)
                part, place, size = slice(begin, end), 2 * (begin - start), end - begin
                if theirs != 0:
                    add_bf16(weight[part], _bf16(theirs + place, size), _bf16(mine + place, size), share)
                if message != 0:
                    before[:size] = weight[part]
                _update(weight[part], gradient[part], mean[part], square[part], factors[k], rates)
                if message != 0:
                    lay_bf16(weight[part], before, _bf16(message + place, size), by)
        part = slice(done, sizes[k])
        _update(weight[part], gradient[part], mean[part], square[part], factors[k], rates)


# These count from zero: otherwise every index might be one from the end, and no loop would be vectorised.


@compiled(error_model="numpy")
def _update(weight: Array, gradient: Array, mean: Array, square: Array, factors: Array, rates: Any) -> None:
    first, second, share, rest = factors
    lag, forget, keep, rate, eps = rates
    for i in range(weight.size):
        mean[i] += lag * (gradient[i] - mean[i])
        step = mean[i] * first
        square[i] = forget * square[i] + share * gradient[i] * gradient[i] + rest * step * step
        weight[i] = keep * weight[i] - rate * step / (np.sqrt(square[i] * second) + eps)


@compiled()
def _bf16(address: int, size: int) -> Array:
    return carray(memory(address), size, np.int16)


@compiled()
def add_bf16(weight: Array, theirs: Array, mine: Array, share: Any) -> None:
    """Inside compiled functions: weight ← weight + share·(theirs − mine), of bfloat16 numbers, as their bits (``int16``)."""
    for i in range(weight.size):
        weight[i] += share * (from_bf16(theirs[i]) - from_bf16(mine[i]))


@compiled()
def lay_bf16(weight: Array, before: Array, message: Array, by: Any) -> None:
    """Inside compiled functions: message ← weight + by·(weight − before), rounded to bfloat16 numbers, as their bits."""
    for i in range(weight.size):
        message[i] = to_bf16(np.float32(weight[i] + by * (weight[i] - before[i])))
