"""The gradient noise scale is that of the gradients: known where gradients are drawn with a known mean and variance."""

import math

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce, loopback
from gossamer.algorithms import Algorithm

ELEMENTS = 4000


def measured(algorithm: Algorithm, noise: float, world: int = 4, steps: int = 30, statistics: bool = True) -> dict[str, float]:
    def body(rank: int) -> dict[str, float]:
        weight = nn.ParameterList([nn.Parameter(torch.zeros(ELEMENTS))])
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
        replica = gossamer.replicate(weight, optimizer, algorithm, statistics=statistics)
        drawn = torch.Generator().manual_seed(rank)
        for _ in range(steps):
            optimizer.zero_grad()
            (weight[0] * (1 + noise * torch.randn(ELEMENTS, generator=drawn))).sum().backward()
            optimizer.step()
        return replica.metrics()

    return loopback(body, world)[0]


@pytest.mark.parametrize("noise", [0.5, 2.0, 4.0])
@pytest.mark.parametrize("world", [2, 4])
def test_it_is_variance_over_squared_mean(noise: float, world: int) -> None:
    assert measured(AllReduce(), noise, world)["noise_scale"] == pytest.approx(noise**2, rel=0.15)


def test_it_is_known_of_other_means_too() -> None:
    assert measured(ScatterReduce(), 2.0)["noise_scale"] == pytest.approx(4.0, rel=0.2)


def test_it_is_not_measured_unasked_nor_where_no_gradients_travel() -> None:
    assert "noise_scale" not in measured(AllReduce(), 1.0, steps=2, statistics=False)
    assert math.isnan(measured(Gossip(), 1.0, steps=2)["noise_scale"])
