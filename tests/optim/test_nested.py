"""A subclass whose step calls that of its base class takes one step, although torch calls the hooks of both."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import ChunkSparse, Gossip, LocalSGD, loopback
from gossamer.algorithms import Algorithm
from gossamer.hooks import in_nested_step
from gossamer.optim import GossipAdamW


class Plain(SGD):
    pass


class Counting(SGD):
    """As they are written for logs and schedules."""

    taken = 0

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.taken += 1
        if self.taken == 3:
            torch.rand(1)
        return super().step(closure)


class CountingGossipAdamW(GossipAdamW):
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        return super().step(closure)


@pytest.fixture(autouse=True)
def _a_plain_one_was_made_before() -> None:
    for plain in (SGD, GossipAdamW):
        plain([nn.Parameter(torch.ones(1))], lr=0.1)


def trained(kind: type[torch.optim.Optimizer], algorithm: Algorithm, **options: float) -> list[tuple[int, int, list[float]]]:
    def body(rank: int) -> tuple[int, int, list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 3)
        optimizer = kind(model.parameters(), lr=0.1, **options)  # type: ignore[call-arg]
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(8):
            optimizer.zero_grad()
            model(torch.ones(1, 3) + rank).square().sum().backward()
            optimizer.step()
        exchanges = sum(sync.exchanges for sync in replica._weights)
        messages = int(replica.metrics()["messages_sent"])
        replica.close()
        return exchanges, messages, model.weight.flatten().tolist()

    return loopback(body, 2)


MOMENTUM = {"momentum": 0.9, "weight_decay": 0.1}


@pytest.mark.parametrize(
    ("algorithm", "options"),
    [
        (Gossip(), {}),
        (Gossip(ahead=1.0), {}),
        (LocalSGD(every=4), {}),
        (ChunkSparse(density=1.0, momentum_correction=True), MOMENTUM),
    ],
    ids=lambda value: repr(value) if isinstance(value, Algorithm) else "",
)
def test_hooks_act_once(algorithm: Algorithm, options: dict[str, float]) -> None:
    assert trained(Counting, algorithm, **options) == trained(Plain, algorithm, **options)


def test_a_subclass_of_gossip_adamw() -> None:
    assert [found[0] for found in trained(CountingGossipAdamW, Gossip())] == [8, 8]


def test_it_is_told_from_a_step_after_one_that_an_error_ended() -> None:
    """A count of steps that have begun would take the next one for a part of it."""
    found: list[bool] = []
    optimizer = Counting([nn.Parameter(torch.ones(1))], lr=0.1)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: found.append(in_nested_step(optimizer)))

    def failing() -> float:
        raise ValueError

    with pytest.raises(ValueError):
        optimizer.step(failing)
    optimizer.step()
    assert found == [False, True] * 2


def test_a_step_inside_of_another_optimizers_is_its_own() -> None:
    found: list[bool] = []
    inner = Counting([nn.Parameter(torch.ones(1))], lr=0.1)
    inner.register_step_pre_hook(lambda optimizer, args, kwargs: found.append(in_nested_step(optimizer)))
    outer = Counting([nn.Parameter(torch.ones(1))], lr=0.1)
    outer.register_step_pre_hook(lambda optimizer, args, kwargs: inner.step() if not in_nested_step(optimizer) else None)
    outer.step()
    assert found == [False, True]
