"""LBFGS decides by the loss how often and where it evaluates the next one: by the mean loss, the same on all ranks."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, Gossip, loopback
from gossamer.optim import MasterWeights

WORLD = 2


def data(rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(8, 3, generator=generator), torch.randn(8, 1, generator=generator)


def made() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))


def fit(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> tuple[int, list[float]]:
    """How many evaluations three steps took, and the losses that they returned."""
    evaluations = 0

    def closure() -> Tensor:
        nonlocal evaluations
        evaluations += 1
        optimizer.zero_grad()
        loss: Tensor = (model(x) - y).square().mean()
        loss.backward()
        return loss

    losses: list[Any] = [optimizer.step(closure) for _ in range(3)]
    return evaluations, [float(torch.as_tensor(loss).detach()) for loss in losses]


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_ranks_with_other_data_go_the_same_way_which_is_that_of_all_data(search: str | None) -> None:
    def body(rank: int) -> tuple[int, list[float], Tensor]:
        model = made()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, line_search_fn=search)
        replica = gossamer.replicate(model, optimizer, AllReduce())
        found = fit(model, optimizer, *data(rank))
        replica.close()
        return *found, model[0].weight.detach()

    (evaluations, losses, weights), (others, others_losses, others_weights) = loopback(body, WORLD)
    assert (evaluations, losses) == (others, others_losses)
    assert torch.equal(weights, others_weights)
    alone = made()
    whole = [torch.cat(parts) for parts in zip(*map(data, range(WORLD)), strict=True)]
    expected, expected_losses = fit(alone, torch.optim.LBFGS(alone.parameters(), lr=0.5, line_search_fn=search), *whole)
    assert evaluations == expected
    assert losses == pytest.approx(expected_losses, rel=1e-2)


def test_around_master_weights_too() -> None:
    def body(rank: int) -> tuple[int, list[float]]:
        model = made().bfloat16()
        optimizer = MasterWeights(torch.optim.LBFGS, model.parameters(), lr=0.5, line_search_fn="strong_wolfe")
        replica = gossamer.replicate(model, optimizer, AllReduce())
        found = fit(model, optimizer, *(tensor.bfloat16() for tensor in data(rank)))
        replica.close()
        return found

    first, second = loopback(body, WORLD)
    assert first == second


def test_where_weights_are_exchanged_each_goes_its_own_way() -> None:
    def body(rank: int) -> list[float]:
        model = made()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5)
        replica = gossamer.replicate(model, optimizer, Gossip())
        _, losses = fit(model, optimizer, *data(rank))
        replica.close()
        return losses

    first, second = loopback(body, WORLD)
    assert first[0] != second[0]
