"""Constant updates, different on each worker, with momentum: on every wire the mean moves by their whole mean."""

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    DecentralizedSGD,
    Gossip,
    GossipPGA,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    PushSum,
    QuantizedGossip,
    loopback,
)
from gossamer.codecs import Quantize, Sign
from gossamer.comm.digraph import RandomPush
from gossamer.comm.topology import Dissemination, RandomMatching, rotated

WORLD, STEPS, RATE, MOMENTUM = 4, 100, 1e-5, 0.9

WIRES = [
    Gossip(wire="fp16", every=3),
    Gossip(ahead=1.0),
    Gossip(wire="bf16", topology=rotated(Dissemination())),
    DecentralizedSGD(topology=RandomMatching()),
    GossipPGA(period=3),
    LocalSGD(every=3),
    QuantizedGossip(bits=8),
    QuantizedGossip(topology=rotated(Dissemination())),
    LowPrecisionDecentralized(),
    LowPrecisionDecentralized(codec=Quantize(bits=2), rate=0.5),
    LowPrecisionDecentralized(codec=Sign(), rate=0.3),
    PushSum(topology=RandomPush(), wire="bf16"),
    Hierarchical(Gossip(), ranks_per_node=2),
]


@pytest.mark.parametrize("algorithm", WIRES, ids=repr)
def test_the_mean_moves_its_full_length(algorithm: gossamer.Algorithm) -> None:
    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(20, 1, bias=False)
        begin = model.weight.detach().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(STEPS):
            optimizer.zero_grad()
            (model.weight.sum() * (1 + rank)).backward()
            optimizer.step()
        with replica.consensus():
            return model.weight.detach().double() - begin

    expected = velocity = 0.0
    for _ in range(STEPS):
        velocity = MOMENTUM * velocity + (WORLD + 1) / 2
        expected -= RATE * velocity
    for moved in loopback(body, WORLD):
        assert (moved / expected - 1).abs().max() < 0.01


ALONE = [(algorithm, world) for algorithm in (*WIRES, GossipPGA(period=1)) for world in (4, 8)]
ALONE.append(pytest.param(GossipPGA(period=1), 64, marks=pytest.mark.slow))


@pytest.mark.parametrize(("algorithm", "world"), ALONE, ids=repr)
def test_the_update_of_one_worker_alone_arrives(algorithm: gossamer.Algorithm, world: int) -> None:
    """All others have none: what reaches them is small beside their weights, and none of it may be taken for rounding."""
    steps, rate = 60, 50 * world * torch.finfo(torch.float32).eps

    def body(rank: int) -> Tensor:
        model = nn.Linear(20, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(steps):
            optimizer.zero_grad()
            (model.weight.sum() * (rank == 1)).backward()
            optimizer.step()
        with replica.consensus():
            return 1 - model.weight.detach().double()

    for moved in loopback(body, world):
        assert (moved / (steps * rate / world) - 1).abs().max() < 0.05
