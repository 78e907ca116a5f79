"""Running statistics that travel with the weights, where workers see different data: they stay what they can be."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    DecentralizedSGD,
    DiLoCo,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    QuantizedGossip,
    in_parts,
    loopback,
)
from gossamer.algorithms import Algorithm
from gossamer.comm.topology import Complete

WORLD = 4

MOVERS = [
    Gossip(),
    GossipGraD(late=True),
    GossipPGA(period=2),
    DecentralizedSGD(topology=Complete()),
    QuantizedGossip(bits=8),
    LowPrecisionDecentralized(),
    LocalSGD(every=2),
    DiLoCo(every=2),
    in_parts(2, Gossip()),
    Hierarchical(Gossip(), ranks_per_node=2),
    Hierarchical(in_parts(2, GossipPGA(period=1)), ranks_per_node=2),
]


def one_far_away(rank: int, step: int) -> float:
    return 5.0 if rank == 0 else 0.1


def outliers(rank: int, step: int) -> float:
    return 20.0 if rank == step % WORLD else 0.5


def trained(
    algorithm: Algorithm, scale: Callable[[int, int], float], passes: int, steps: int = 24
) -> list[tuple[float, Tensor]]:
    """The least that any running variance was, and the batch norm's mean and variance at the end; by rank."""

    def body(rank: int) -> tuple[float, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        replica = gossamer.replicate(model, optimizer, algorithm)
        least = torch.inf
        for step in range(24):
            optimizer.zero_grad()
            for number in range(passes):
                generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
                model(torch.randn(32, 3, generator=generator) * scale(rank, step)).sum().backward()
            optimizer.step()
            least = min(least, model[0].running_var.min().item())
        replica.close(average=False)
        return min(least, model[0].running_var.min().item()), torch.cat([model[0].running_mean, model[0].running_var])

    return loopback(body, WORLD)


@pytest.mark.parametrize("passes", [1, 8])
@pytest.mark.parametrize("scale", [one_far_away, outliers])
@pytest.mark.parametrize("algorithm", MOVERS, ids=repr)
def test_variances_stay_positive(algorithm: Algorithm, scale: Callable[[int, int], float], passes: int) -> None:
    assert min(least for least, _ in trained(algorithm, scale, passes)) > 0


def test_workers_of_a_machine_have_the_mean_of_their_statistics() -> None:
    """What one of them has seen reaches the other one, and the other machine."""
    alone = trained(Hierarchical(Gossip(every=1000), ranks_per_node=2), one_far_away, 1)
    found = trained(Hierarchical(Gossip(), ranks_per_node=2), one_far_away, 1)
    assert alone[1][1][3:].max() < 0.2
    # Half of the first worker's variance of 25, and in the end a quarter.
    assert found[1][1][3:].min() > 4
    assert found[3][1][3:].min() > 2
