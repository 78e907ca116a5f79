"""Compiling: loops on the CPU, compiled by numba at their first use."""

from collections.abc import Callable
from typing import Any

from numba import njit


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """A decorator: the function, compiled without the interpreter's lock and kept on disk; where numba can write nowhere,
    compiled in each process anew. ``options``: of ``numba.njit``."""

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(function, nogil=True, cache=True, **options)
        except RuntimeError:  # raised here, not at the first use, if the package and the home directory are both read-only
            return njit(function, nogil=True, **options)

    return decorate
