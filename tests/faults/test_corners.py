"""Topologies of one world, and what is loaded before ranks meet."""

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

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
    [
        "ScatterReduce(codec=Quantize(bits=4))",
        pytest.param("ScatterReduce(codec=Sign())", marks=pytest.mark.slow),
        pytest.param("QuantizedGossip()", marks=pytest.mark.slow),
        "ChunkSparse()",
    ],
)
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


def test_nothing_is_compiled_amid_training_where_nothing_was_compiled_before(tmp_path: Path) -> None:
    """An optimizer that communicates by itself has its codec compiled in ``replicate()`` as well; and nobody has a cache."""
    script = """
import torch, gossamer
from numba.core import event
from torch import nn
from gossamer.optim import OneBitAdam

class Listener(event.Listener):
    def on_start(self, told):
        compiled.append(str(told.data["dispatcher"]))

    def on_end(self, told):
        pass

def body(rank):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = OneBitAdam(model.parameters(), lr=0.01, warmup=1)
    replica = gossamer.replicate(model, optimizer)
    with replica.no_sync():
        model(torch.ones(2, 64)).sum().backward()
    if rank == 0:
        before.extend(compiled)
    for _ in range(4):
        optimizer.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
    replica.close()

compiled, before = [], []
event.register("numba:compile", Listener())
gossamer.loopback(body, 2)
assert before, "nothing was compiled, so that nothing was shown"
assert compiled == before, compiled[len(before):]
"""
    cold = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=250, env=cold)
    assert done.returncode == 0, done.stderr[-2000:]
