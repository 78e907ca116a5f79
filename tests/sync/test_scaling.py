"""Overflow is agreed by all ranks."""

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, Gossip, loopback
from gossamer.sync.scaling import any_non_finite

NUMBERS = torch.tensor([1.0, -2.0, 0.0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_one_bad_element_is_seen(dtype: torch.dtype, bad: float) -> None:
    tensors = [NUMBERS.to(dtype, copy=True) for _ in range(5)]
    assert any_non_finite(tensors).item() == 0
    tensors[3][1] = bad
    assert any_non_finite(tensors).item() == 1


def test_what_is_no_overflow() -> None:
    assert any_non_finite([]).item() == 0
    assert any_non_finite([torch.zeros(0), torch.tensor([2**60]), torch.tensor([True])]).item() == 0
    assert any_non_finite([torch.tensor([1e300], dtype=torch.float64)]).item() == 0
    assert any_non_finite([torch.tensor([torch.finfo(torch.float16).max], dtype=torch.float16)]).item() == 0
    assert any_non_finite([torch.zeros(0), torch.tensor([1e300, float("inf")], dtype=torch.float64)]).item() == 1


@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip()], ids=repr)
@pytest.mark.parametrize("enabled", [True, False])
def test_all_ranks_skip_together(algorithm: gossamer.Algorithm, enabled: bool) -> None:
    def body(rank: int) -> tuple[float, bool]:
        model = nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", enabled=enabled, init_scale=4.0)
        gossamer.replicate(model, optimizer, algorithm, scaler=scaler)
        before = model.weight.clone()
        loss = model(NUMBERS + rank).sum()
        scaler.scale(loss * float("inf") if rank == 1 and enabled else loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale(), torch.equal(before, model.weight)

    assert loopback(body, 3) == [(2.0, True) if enabled else (1.0, False)] * 3
