"""Topologies of one world, and what is loaded before ranks meet."""

import subprocess
import sys
from dataclasses import dataclass

import pytest
from torch import nn, optim

import gossamer
from gossamer import Gossip, PushSum, QuantizedGossip, in_parts, loopback
from gossamer.algorithms.base import Algorithm
from gossamer.comm.topology import Permutation, Topology, exchange


@dataclass(frozen=True)
class OfFour(Topology):
    """Pairs of four ranks, and nothing else."""

    def at(self, step: int, world: int) -> Permutation:  # type: ignore[override]
        if world != 4:
            raise gossamer.ConfigurationError(f"these are pairs of 4 ranks; there are {world}")
        pairs = (1, 0, 3, 2) if step % 2 else (2, 3, 0, 1)
        return exchange(4, [Permutation(pairs)])  # type: ignore[return-value]


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(topology=OfFour()),
        Gossip(topology=OfFour(), wire="fp32"),
        in_parts(2, Gossip(topology=OfFour())),
        QuantizedGossip(topology=OfFour()),
        PushSum(topology=OfFour()),
    ],
    ids=repr,
)
def test_a_topology_may_serve_one_world_only(algorithm: Algorithm) -> None:
    def body(rank: int) -> float:
        model = nn.Linear(1, 2, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(20):
            optimizer.zero_grad()
            (model.weight * (rank if step == 0 else 0)).sum().backward()
            optimizer.step()
        replica.close(average=True)
        return model.weight[0].item()

    assert loopback(body, 4) == pytest.approx([-1.5] * 4, abs=0.02)


@pytest.mark.parametrize(
    "algorithm",
    ["ScatterReduce(codec=Quantize(bits=4))", "ScatterReduce(codec=Sign())", "QuantizedGossip()", "ChunkSparse()"],
)  # fmt: skip
def test_kernels_are_loaded_before_the_first_exchange(algorithm: str) -> None:
    """What compiles kernels, and their modules, are there when ``replicate()`` returns."""
    script = f"""
import sys, torch, gossamer
from torch import nn
from gossamer import *
from gossamer.codecs import Quantize, Sign

def body(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, {algorithm})
    with replica.no_sync():
        model(torch.ones(2, 64)).sum().backward()
    if rank == 0:
        before.update(sys.modules)
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    replica.close()

before = {{}}
from torch.optim import SGD
p = nn.Parameter(torch.zeros(1)); p.grad = torch.zeros(1); SGD([p], lr=0.1).step()
gossamer.loopback(body, 2)
ours = ("numba", "llvmlite", "triton", "gossamer")
late = sorted(name for name in set(sys.modules) - set(before) if name.split(".")[0] in ours)
assert not late, late[:9]
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
