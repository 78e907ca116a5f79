"""Compiling: where numba can keep no cache, loops are compiled all the same."""

import subprocess
import sys

import numpy as np
import pytest

from gossamer.compiling import compiled


def halved(numerator: float, divisor: float) -> float:
    return numerator / divisor


def divided(numerator: float, divisor: float) -> float:
    """Another function than the one above: numba's cache on disk does not ask with which options one was compiled."""
    return numerator / divisor


def test_a_loop_is_compiled_with_its_options() -> None:
    loop = compiled(error_model="numpy")(halved)
    assert loop(3.0, 2.0) == 1.5
    assert np.isinf(loop(3.0, 0.0))
    assert len(loop.signatures) == 1, "compiled, and used"
    with pytest.raises(ZeroDivisionError):
        compiled()(divided)(3.0, 0.0)


def test_without_a_cache_codecs_are_compiled_in_each_process_anew() -> None:
    """Optimizers: see ``optim/test_numba_cache.py``."""
    code = """
import warnings
from numba.core import caching
caching.CompileResultCacheImpl._locator_classes = []  # as with nothing but read-only folders
import torch
from gossamer.codecs import Quantize, Sign
from gossamer.codecs.kernels import compiler_for
warnings.simplefilter("error")
for codec in (Quantize(), Sign()):
    x = torch.randn(1000)
    payload, rest = codec.encode_rest(x, None)
    assert torch.allclose(codec.decode(payload, 1000, x.dtype) + rest, x, atol=1e-6)
assert compiler_for("cpu") == "numba"
"""
    subprocess.run([sys.executable, "-c", code], check=True)
