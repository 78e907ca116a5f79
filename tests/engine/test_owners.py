"""Optimizers that take turns over one replica: what is agreed, and averaged, for each of them by itself.

What one does not use of another's pass: ``test_discarded.py``.
"""

import pytest
import torch
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer import AllReduce, ByteGrad, Gossip, ScatterReduce, loopback
from gossamer.algorithms import Algorithm


@pytest.mark.parametrize("algorithm", [AllReduce(), ByteGrad(), ScatterReduce(), Gossip()], ids=repr)
def test_an_overflow_of_one_ends(algorithm: Algorithm) -> None:
    """Its gradients stay until its own next turn: they make nobody else skip, and so do not come back to it either."""

    def body(rank: int) -> tuple[list[float], list[bool]]:
        nets = nn.ModuleList([nn.Linear(64, 4, bias=False) for _ in range(2)])
        optimizers = [SGD(net.parameters(), lr=0.1) for net in nets]
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1000)
        gossamer.replicate(nets, optimizers, algorithm, scaler=scaler)
        scales, moves = [], []
        for step in range(6):
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                before = net.weight.detach().clone()
                broken = step == 1 and rank == 1 and net is nets[1]
                scaler.scale(net(torch.ones(1, 64)).sum() * (float("inf") if broken else 1.0)).backward()
                scaler.step(optimizer)
                moves.append(not torch.equal(before, net.weight))
            scaler.update()
            scales.append(scaler.get_scale())
        return scales, moves

    for scales, moves in loopback(body, 3):
        assert scales == [16.0] + [8.0] * 5
        assert moves == [True] * 3 + [False] + [True] * 8


def test_only_what_is_not_exact_is_kept_apart() -> None:
    def body(rank: int) -> dict[str, int]:
        found = {}
        for algorithm in (AllReduce(), ScatterReduce()):
            nets = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
            replica = gossamer.replicate(nets, [SGD(net.parameters(), lr=0.1) for net in nets], algorithm)
            assert replica._gradients is not None
            found[repr(algorithm)] = len(replica._gradients.exchange.buckets)
            replica.close()
        return found

    for found in loopback(body, 2):
        assert list(found.values()) == [1, 3], "of ScatterReduce the biases of both together, and the matrices of each"
