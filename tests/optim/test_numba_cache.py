"""Numba's cache: where it can be kept nowhere, the optimizers' loops are compiled all the same."""

import importlib.util
import sys

import pytest
import torch
from numba import njit
from numba.core import caching
from torch import Tensor, nn

from gossamer.optim import GossipAdamW, loops


def updated(dtype: torch.dtype) -> Tensor:
    """A weight after three steps."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(1000, generator=generator, dtype=dtype))
    optimizer = GossipAdamW([weight], averaged_over=4)
    for _ in range(3):
        weight.grad = torch.randn(1000, generator=generator, dtype=dtype)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_without_a_cache_an_update_is_the_same_to_the_bit(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = updated(dtype)
    monkeypatch.setattr(caching.CompileResultCacheImpl, "_locator_classes", [])  # as with nothing but read-only folders
    with pytest.raises(RuntimeError, match="cannot cache function"):
        njit(cache=True)(updated)
    spec = importlib.util.spec_from_file_location(loops.__name__, loops.__file__)
    again = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(again)
    monkeypatch.setitem(sys.modules, loops.__name__, again)
    assert torch.equal(updated(dtype), expected)
    assert len(again.adamw.signatures) == 1, "compiled, and used"
