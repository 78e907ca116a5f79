"""Nested values as bytes, without pickle."""

import math

import pytest
import torch
from torch import Tensor

from gossamer.engine.plain import read, written

DTYPES = [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64, torch.float32]


def equal(one: object, other: object) -> bool:
    """In types, structure and bits."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(*raw)
    if isinstance(one, dict) and isinstance(other, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and repr(one) == repr(other)


@pytest.mark.parametrize("shape", [(), (0,), (0, 3), (3,), (3, 5), (2, 1, 7)])
def test_tensors_of_every_dtype_and_shape(shape: tuple[int, ...]) -> None:
    values = [torch.randn(shape).to(dtype) for dtype in DTYPES]  # odd sizes of one byte before wider ones
    assert equal(read(written(values)), values)


def test_structure_types_and_numbers_are_kept() -> None:
    state = {
        0: {"step": torch.tensor(3.0), "moment": torch.arange(5)},
        "groups": [{"lr": 0.1, "betas": (0.9, 0.1 + 0.2), "foreach": None, "nesterov": False, "params": [0, 1]}],
        "extremes": [math.inf, -math.inf, math.nan, 2**70, -0.0, 5e-324],
        "empty": [{}, [], (), ""],
        "text": 'tensor "quoted" ∇',
        "dtype": torch.bfloat16,
        "list that looks like a tensor": ["tensor", "torch.float32", [2**40]],
    }
    assert equal(read(written(state)), state)


def test_tensors_that_are_no_dense_row_of_memory() -> None:
    whole = torch.randn(6, 8)
    for view in (whole.T, whole[::2, 1::3], whole[0].expand(4, 8)):
        assert torch.equal(read(written({"view": view}))["view"], view)


@pytest.mark.parametrize(
    ("value", "told"),
    [(object(), "object"), (print, "builtin_function"), ({1, 2}, "set"), (torch.ones(2).to_sparse(), "sparse")],
    ids=["object", "function", "set", "sparse"],
)
def test_anything_else_is_refused_with_its_place(value: object, told: str) -> None:
    with pytest.raises(TypeError, match=rf"state\['groups'\]\[1\]\['own'\] is .*{told}"):
        written({"groups": [{}, {"own": value}]}, "state")
