"""AllReduce: DDP's mean, at a ring's price."""

from typing import Any

import pytest
import torch

from gossamer import AllReduce
from gossamer.errors import ConfigurationError

from ..contracts.cases import exchange, noise, tap


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_the_wire_is_never_wider_than_the_gradient(dtype: torch.dtype, wire: str) -> None:
    tape: dict = {}
    exchange(tap(AllReduce(wire=wire), tape), [noise(2, 10, dtype)])
    on_the_wire = getattr(torch, tape[0, 0][0].split("(")[1].split("[")[0])
    narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(wire, dtype)
    assert on_the_wire == (narrow if dtype.itemsize > 2 else dtype)


@pytest.mark.parametrize("world", [1, 2, 4, 8])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_sums_that_are_exact_stay_exact(world: int, wire: str) -> None:
    """Small multiples of a power of two, among a power of two of ranks: no wire rounds them."""
    tensors = [(8 * t).round().clamp(-16, 16) / 8 for t in noise(world, 50)]
    for outcome in exchange(AllReduce(wire=wire), [tensors]):
        assert torch.equal(outcome.results[0], torch.stack(tensors).mean(0))


def test_a_half_precision_sum_does_not_overflow() -> None:
    tensors = [torch.full((3,), 6e4)] * 8
    assert torch.equal(exchange(AllReduce(wire="fp16"), [tensors])[0].results[0], tensors[0])


@pytest.mark.parametrize(("gather_below", "operation"), [(0, "all_reduce"), (79, "all_reduce"), (80, "all_gather")])
def test_what_is_short_is_gathered_from_all(gather_below: int, operation: str) -> None:
    """Ten elements of 4 bytes come from each of two others."""
    tape: dict = {}
    outcome, *_ = exchange(tap(AllReduce(gather_below=gather_below), tape), [noise(3, 10)])
    assert {said[0].partition("(")[0] for said in tape.values()} == {f"start {operation}"}
    torch.testing.assert_close(outcome.results[0], torch.stack(noise(3, 10)).mean(0))


@pytest.mark.parametrize("gather_below", [-1, 1.5, True, "64 kB"])
def test_gather_below_is_a_number_of_bytes(gather_below: Any) -> None:
    with pytest.raises(ConfigurationError, match="gather_below must be a number of bytes"):
        AllReduce(gather_below=gather_below)
