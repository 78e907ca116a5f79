"""Compiling: loops on the CPU, compiled by numba at their first use."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: the function, compiled without the interpreter's lock and kept on disk; where numba can write nowhere,
    compiled in each process anew. ``options``: of ``numba.njit``."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(function, nogil=True, cache=True, **options)
        except RuntimeError:  # raised here, not at the first use, if the package and the home directory are both read-only
            return njit(function, nogil=True, **options)

    return decorate


def _turned_to_memory(context: Any, address: Any) -> Any:
    """For the compiler: an address as a pointer."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), made


memory: Any = intrinsic(_turned_to_memory)
"""Inside compiled functions: the memory at an address, for ``numba.carray``. To hand over many arrays would take longer than
what is computed on small ones."""


def _turned_to_float(context: Any, bits: Any) -> Any:
    """For the compiler: the float32 of these bits."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), made


float_of_bits: Any = intrinsic(_turned_to_float)
"""Inside compiled functions: the float32 number that these bits, an int32, are."""


def _turned_to_bits(context: Any, number: Any) -> Any:
    """For the compiler: the bits of this float32."""

    def made(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.int32))

    return types.int32(types.float32), made


bits_of_float: Any = intrinsic(_turned_to_bits)
"""The reverse."""


@compiled()
def from_bf16(bits: Any) -> Any:
    """Inside compiled functions: the float32 number of a bfloat16 number's bits, ``int16``: they are its upper half."""
    return float_of_bits(np.int32(bits) << 16)
