"""Compiling: loops on the CPU, compiled by numba at their first use."""

from collections.abc import Callable
from typing import Any

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
