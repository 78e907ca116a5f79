"""Configurations whose predictions are recorded in ``golden.json``: algorithms, optimizers and networks of a small model."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from gossamer import (
    AllReduce,
    ByteGrad,
    ChunkSparse,
    DecentralizedSGD,
    DiLoCo,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    LocalSGD,
    PowerSGD,
    PushSum,
    QuantizedGossip,
    ScatterReduce,
)
from gossamer.algorithms import Algorithm, after, by_size, in_parts
from gossamer.simulate import Link

WORLD, STEPS, WARMUP = 4, 24, 12

LINKS = {f"{mbit} Mbit/s": Link(bandwidth=mbit * 1e6, latency=1e-3) for mbit in (100, 200, 500, 1000)}


@dataclass(frozen=True)
class Configuration:
    """What is predicted; ``optimizer`` makes the one that steps, on the model's parameters."""

    algorithm: Algorithm
    optimizer: Callable[..., Optimizer] = SGD
    overlap_forward: bool = False


MOMENTUM = partial(SGD, lr=0.1, momentum=0.9)
ADAMW = partial(AdamW, lr=1e-3)

ALONE = [
    AllReduce(),
    AllReduce(bucket_bytes=100_000),
    ScatterReduce(),
    ByteGrad(),
    ChunkSparse(),
    PowerSGD(),
    Gossip(),
    Gossip(every=2),
    Gossip(ahead=1.0),
    GossipPGA(period=4),
    QuantizedGossip(),
    DecentralizedSGD(),
    LocalSGD(every=4),
    DiLoCo(every=4),
    PushSum(),
    in_parts(4, Gossip()),
    Hierarchical(ScatterReduce(), ranks_per_node=1),
    by_size(10_000, small=AllReduce(), large=ScatterReduce()),
    Gossip(lag=2),
    Hierarchical(Gossip(), ranks_per_node=1),
]

CONFIGURATIONS = {
    **{repr(algorithm): Configuration(algorithm) for algorithm in ALONE},
    "after(3, Gossip())": Configuration(after(3, Gossip())),
    "after(3, ScatterReduce(), before=Gossip())": Configuration(after(3, ScatterReduce(), before=Gossip())),
    "GossipGraD, momentum": Configuration(GossipGraD(), MOMENTUM),
    "GossipGraD, AdamW": Configuration(GossipGraD(), ADAMW),
    "GossipGraD(late=True), momentum": Configuration(GossipGraD(late=True), MOMENTUM),
    "ChunkSparse(momentum_correction=True), momentum": Configuration(ChunkSparse(momentum_correction=True), MOMENTUM),
    "AllReduce(), overlap_forward": Configuration(AllReduce(), overlap_forward=True),
    "AllReduce(100 kB), overlap_forward": Configuration(AllReduce(bucket_bytes=100_000), overlap_forward=True),
    "ScatterReduce(), overlap_forward": Configuration(ScatterReduce(), overlap_forward=True),
}


def model() -> nn.Module:
    """Twelve equal layers, and one that holds most of the weights."""
    return nn.Sequential(*(nn.Linear(64, 64) for _ in range(12)), nn.Linear(64, 20_000))
