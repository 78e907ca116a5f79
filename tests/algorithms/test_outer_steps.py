"""Outer steps: torchft's arithmetic, an outer rate that is too large, and workers that were given different periods."""

import warnings
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    ConfigurationError,
    DiLoCo,
    EagerDiLoCo,
    Gossip,
    LocalSGD,
    ScatterReduce,
    SparseLoCo,
    loopback,
    streaming_diloco,
)
from gossamer.algorithms import Algorithm
from gossamer.errors import DisagreementError

from . import resuming
from .test_outer_loops import SIZE, STEPS, WORLD, Pull, inner, nesterov, trained


def as_torchft(count: int, spacing: int, alpha: float) -> Tensor:
    """What torchft's streaming DiLoCo computes without a fragment sync delay, in one process.

    After every ``spacing`` steps the next fragment: its pseudogradient, the saved parameters minus the local ones, is averaged;
    the outer optimizer makes its step on the saved parameters; these are saved; and the parameters become
    ``lerp(global, local, alpha)``.
    """
    models = [Pull() for _ in range(WORLD)]
    optimizers = [inner(model) for model in models]
    cuts = [SIZE * number // count for number in range(count + 1)]
    fragments = [slice(*ends) for ends in pairwise(cuts)]
    saved = [nn.Parameter(models[0].weight.detach()[fragment].clone()) for fragment in fragments]
    outers = [nesterov(parameter) for parameter in saved]
    seen = []
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        if step % spacing == 0:
            number = step // spacing % count  # torchft begins with its first fragment, gossamer with its second one
            local = torch.stack([model.weight.detach()[fragments[number]] for model in models])
            saved[number].grad = (saved[number].detach() - local).mean(0)
            outers[number].step()
            for model, own in zip(models, local, strict=True):
                model.weight.data[fragments[number]] = torch.lerp(saved[number].detach(), own, alpha)
        seen.append(torch.stack([model.weight.detach().clone() for model in models]))
    return torch.stack(seen, 1)


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_without_delay_streaming_diloco_has_the_arithmetic_of_torchft(count: int, alpha: float) -> None:
    algorithm = streaming_diloco(dense=0, every=8, fragments=count, delay=0, merge=alpha)
    torch.testing.assert_close(trained(algorithm)[:, :-1], as_torchft(count, 8 // count, alpha), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(dense=0, every=3, rate=16.0),
        DiLoCo(dense=0, every=3, rate=16.0, averaging=Gossip()),
        EagerDiLoCo(dense=0, every=3, rate=16.0),
        streaming_diloco(dense=0, every=4, fragments=2, delay=1, rate=16.0),
        SparseLoCo(dense=0, every=3, rate=16.0, momentum=0.9),
        SparseLoCo(dense=0, every=3, rate=16.0, momentum=0.9, keep_unsent=False),
    ],
    ids=repr,
)
def test_an_outer_rate_that_diverges_is_named_after_a_few_rounds(algorithm: Algorithm) -> None:
    with pytest.raises(ConfigurationError, match=r"outer optimizer diverges with rate=16\.0, momentum=0\.9: .* weight"):
        trained(algorithm, steps=60)


@pytest.mark.parametrize("seed", [2, 5])
def test_weights_that_stay_near_zero_do_not_diverge(seed: int) -> None:
    """Biases in a bucket of their own, of which noise makes a step that is longer than all before now and then."""
    true = torch.randn(16, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64) / 4

    def body(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Linear(16, 8).double()
        nn.init.zeros_(model.bias)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
        drawn = torch.Generator().manual_seed(100 * seed + rank)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=10, dense=0, averaging=ScatterReduce()))
        for _ in range(500):
            inputs, errors = (torch.randn(8, size, generator=drawn, dtype=torch.float64) for size in (16, 8))
            optimizer.zero_grad()
            (model(inputs) - inputs @ true - errors).square().mean().backward()
            optimizer.step()
        replica.close()
        return float(model.bias.detach().norm())

    assert max(loopback(body, 4)) < 1


def test_what_is_not_finite_in_one_worker_shows_in_all_of_eager_diloco() -> None:
    def body(rank: int) -> bool:
        model = Pull()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        gossamer.replicate(model, optimizer, EagerDiLoCo(dense=0, every=3))
        for step in range(9):
            optimizer.zero_grad()
            (model(rank) * (torch.nan if rank == 1 and step == 2 else 1)).backward()
            optimizer.step()
        return bool(model.weight.isfinite().all())

    assert loopback(body, WORLD) == [False] * WORLD


@pytest.mark.parametrize(
    "algorithm",
    [
        LocalSGD(every=4, dense=0),
        DiLoCo(every=4, dense=0),
        DiLoCo(every=4, dense=0, averaging=Gossip(wire="fp32")),
        EagerDiLoCo(every=4, dense=0),
        SparseLoCo(every=4, dense=0),
        streaming_diloco(every=4, fragments=2, delay=1, dense=0),
    ],
    ids=repr,
)
def test_weights_that_were_loaded_after_replicate_come_together(algorithm: Algorithm) -> None:
    def body(rank: int) -> float:
        model = Pull()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        with torch.no_grad():
            model.weight.add_(rank)
        for _ in range(41):
            optimizer.zero_grad()
            model(0).backward()
            optimizer.step()
        apart = replica.consensus_distance()
        replica.close()
        return apart

    assert max(loopback(body, 4)) < 1e-2


def test_weights_that_grow_from_zero_with_the_learning_rate_do_not_diverge() -> None:
    """A linear warm-up from zero: outer steps are longer than the weights at first."""

    def body(rank: int) -> Tensor:
        model = Pull()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
        replica = gossamer.replicate(model, optimizer, DiLoCo(dense=0, every=2))
        for step in range(60):
            optimizer.param_groups[0]["lr"] = 1e-6 * step
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        replica.close()
        return model.weight.detach()

    assert torch.stack(loopback(body, WORLD))[:, 1:].abs().min() > 0


@pytest.mark.parametrize("make", [LocalSGD, DiLoCo, lambda every: streaming_diloco(every=every, fragments=2)])
def test_workers_with_different_periods_are_named_at_the_start(make: type[LocalSGD]) -> None:
    def body(rank: int) -> None:
        model = Pull()
        gossamer.replicate(model, inner(model), make(every=8 if rank == 1 else 4))

    with pytest.raises(DisagreementError, match=r"ranks differ in algorithm: ranks 0, 2: .*every=\d.*; rank 1: .*every=\d"):
        loopback(body, WORLD)


def as_one_loop(resume_at: int, before: tuple[int, float], then: tuple[int, float], steps: int) -> Tensor:
    """DiLoCo in one process, whose period and outer rate change before one step."""
    models = [Pull() for _ in range(WORLD)]
    optimizers = [inner(model) for model in models]
    start = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    outer, seen = nesterov(start), []
    for step in range(steps):
        every, outer.param_groups[0]["lr"] = before if step < resume_at else then
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            start.grad = start.detach() - torch.stack([model.weight.detach() for model in models]).mean(0)
            outer.step()
            for model in models:
                model.weight.data.copy_(start.detach())
        seen.append(torch.stack([model.weight.detach().clone() for model in models]))
    return torch.stack(seen, 1)


@pytest.mark.parametrize("then", [(3, 0.7), (7, 0.7), (4, 0.3), (5, 0.9)])
@pytest.mark.parametrize("resume_at", [5, 8])
def test_a_run_may_go_on_with_another_period_and_outer_rate(resume_at: int, then: tuple[int, float]) -> None:
    """Outer weights and momentum are those of before, without a warning."""
    algorithms = [DiLoCo(dense=0, delay=0, every=every, rate=rate) for every, rate in ((4, 0.7), then)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "the saved run had other settings")
        found = resuming.trained(
            algorithms[0], WORLD, 18, Pull, inner, lambda model, _, rank, step: model(rank), resume_at, algorithms[1]
        )
    torch.testing.assert_close(found[:, :-1], as_one_loop(resume_at, (4, 0.7), then, 18), rtol=0, atol=1e-12)


def test_what_is_under_way_when_the_period_changes_is_added() -> None:
    """The mean moves by what all have learned, as without any exchange."""
    algorithms = [
        streaming_diloco(dense=0, every=every, fragments=2, delay=3, merge=None, rate=1.0, momentum=0.0) for every in (8, 4)
    ]
    found, alone = (
        resuming.trained(first, WORLD, 18, Pull, inner, lambda model, _, rank, step: model(rank), resume_at, then)
        for first, resume_at, then in ((algorithms[0], 9, algorithms[1]), (LocalSGD(dense=0, every=1000), None, None))
    )
    torch.testing.assert_close(found[:, 17].mean(0), alone[:, 17].mean(0), rtol=0, atol=1e-12)


def test_what_eager_deltas_wait_for_does_not_change() -> None:
    """Others' deltas of one period are used in the next, once: a period of another length begins anew, and says so."""
    with pytest.warns(UserWarning, match=r"other settings \(every is 3, was 5\)"):
        resuming.trained(
            EagerDiLoCo(dense=0, every=5), WORLD, 13, Pull, inner, lambda model, _, rank, step: model(rank), 7,
            EagerDiLoCo(dense=0, every=3),
        )  # fmt: skip
