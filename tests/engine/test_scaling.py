"""Overflow is agreed by all ranks."""

from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce, loopback
from gossamer.codecs import Quantize
from gossamer.comm.connect import connect
from gossamer.engine.finite import any_non_finite
from gossamer.engine.loss_scale import agree_on_overflow

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


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_flag_is_of_one_type_whatever_the_default(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        for tensors in ([], [torch.ones(3)], [torch.tensor([float("inf")])]):
            assert any_non_finite(tensors).dtype == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)


def test_overflow_is_agreed_with_a_rank_that_has_no_gradients() -> None:
    def body(rank: int) -> float | None:
        parameter = nn.Parameter(torch.zeros(1))
        parameter.grad = [None, torch.tensor([float("inf")]), torch.tensor([3.0])][rank]
        agree_on_overflow(connect(), torch.amp.GradScaler("cpu"), [[parameter]])
        return None if parameter.grad is None else parameter.grad.item()

    assert loopback(body, 3) == [None, float("inf"), float("inf")]


@pytest.mark.parametrize("residual", ["fp32", "bf16"])
def test_what_is_unsent_follows_the_scale_of_the_loss(residual: str) -> None:
    """Bit for bit as with the scale that it has at last: scales are powers of two."""

    def trained(scales: list[float]) -> list[float]:
        def body(rank: int) -> list[float]:
            torch.manual_seed(0)
            model = nn.Linear(16, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = torch.amp.GradScaler("cpu", init_scale=scales[0])
            algorithm = ScatterReduce(codec=Quantize(bits=2), residual=residual, gather_below=0)
            gossamer.replicate(model, optimizer, algorithm, scaler=scaler)
            for number, scale in enumerate(scales):
                if number:
                    scaler.update(scale)
                optimizer.zero_grad()
                inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(2 * number + rank))
                scaler.scale(model(inputs).square().mean()).backward()
                scaler.step(optimizer)
            return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

        found = loopback(body, 2)
        assert found[0] == found[1]
        return list(found[0])

    assert trained([4.0, 8.0, 8.0, 2.0, 2.0, 16.0]) == trained([4.0] * 6)


def test_a_state_is_loaded_with_the_scale_that_it_is_of() -> None:
    """After a rollback within one process the scale of the last step is not that of what is loaded."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Linear(16, 4)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        replica = gossamer.replicate(model, optimizer, ScatterReduce(codec=Quantize(bits=2), gather_below=0), scaler=scaler)

        def train(scale: float) -> None:
            optimizer.zero_grad()
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
            if replica.step:
                scaler.update(scale)
            scaler.scale(model(inputs).square().mean()).backward()
            scaler.step(optimizer)

        train(1024.0)
        state = replica.state_dict()
        assert state["scale"] == 1024.0
        residual = state[f"rank{rank}"][0]["residual"]["weight"].clone()
        train(2.0)
        replica.load_state_dict(state)
        scaler.update(1024.0)
        replica._loop.pass_without_gradients()
        assert torch.equal(replica.state_dict()[f"rank{rank}"][0]["residual"]["weight"], residual)

    loopback(body, 2)


@pytest.mark.parametrize(("before", "now"), [(1024.0, None), (None, 1024.0), (1024.0, 8.0)])
def test_what_is_unsent_survives_the_beginning_and_the_end_of_scaling(before: float | None, now: float | None) -> None:
    def body(rank: int) -> None:
        def run(scale: float | None, state: dict[str, Any] | None) -> dict[str, Any]:
            torch.manual_seed(0)
            model = nn.Linear(16, 4)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale)
            algorithm = ScatterReduce(codec=Quantize(bits=2), gather_below=0)
            replica = gossamer.replicate(model, optimizer, algorithm, scaler=scaler)
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(rank))
            loss = model(inputs).square().mean()
            loss = loss if scaler is None else scaler.scale(loss)
            if state is None:
                loss.backward()
                optimizer.step()
            else:
                replica.load_state_dict(state)
                replica._loop.pass_without_gradients()
            found: dict[str, Any] = replica.state_dict()
            replica.close()
            return found

        first = run(before, None)
        then = run(now, first)
        residuals = [each[f"rank{rank}"][0]["residual"]["weight"] / each["scale"] for each in (first, then)]
        assert residuals[0].any()
        torch.testing.assert_close(*residuals)

    loopback(body, 2)


def test_a_step_that_not_all_would_skip_is_refused() -> None:
    """Where weights travel a pass inside no_sync() is one to take a step for; but overflow is agreed on in the others."""

    def body(rank: int, scaled: bool) -> None:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip(), scaler=torch.amp.GradScaler("cpu", enabled=scaled))
        with replica.no_sync():
            model(torch.ones(1, 4)).sum().backward()
        if scaled:
            with pytest.raises(gossamer.UsageError, match=r"no backward pass outside of no_sync\(\)"):
                optimizer.step()
        else:
            optimizer.step()

    for scaled in (True, False):
        loopback(lambda rank, scaled=scaled: body(rank, scaled), 2)


@pytest.mark.parametrize("broken", [False, True])
def test_sparse_gradients_beside_weights_that_are_exchanged(broken: bool) -> None:
    def body(rank: int) -> tuple[float, bool]:
        torch.manual_seed(0)
        model = nn.Embedding(5, 3, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        replica = gossamer.replicate(model, optimizer, Gossip(), scaler=scaler)
        before = model.weight.detach().clone()
        factor = float("inf") if broken and rank == 1 else 1.0
        scaler.scale((model(torch.tensor([rank, rank, 3])) * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        replica.close()
        return scaler.get_scale(), torch.equal(model.weight, before)

    assert loopback(body, 2) == [(2.0 if broken else 4.0, broken)] * 2
