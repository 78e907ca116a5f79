"""Compiling: where numba can keep no cache, loops are compiled all the same."""

import numpy as np
import pytest
from numba import njit
from numba.core import caching

from gossamer.compiling import compiled


def halved(numerator: float, divisor: float) -> float:
    return numerator / divisor


def divided(numerator: float, divisor: float) -> float:
    """Another function than the one above: numba's cache on disk does not ask with which options one was compiled."""
    return numerator / divisor


@pytest.mark.parametrize("kept", [True, False])
def test_a_loop_is_compiled_with_its_options(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])  # as with nothing but read-only folders
        with pytest.raises(RuntimeError, match="cannot cache function"):
            njit(cache=True)(halved)
    loop = compiled(error_model="numpy")(halved)
    assert loop(3.0, 2.0) == 1.5
    assert np.isinf(loop(3.0, 0.0))
    assert len(loop.signatures) == 1, "compiled, and used"
    with pytest.raises(ZeroDivisionError):
        compiled()(divided)(3.0, 0.0)
