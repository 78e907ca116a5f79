"""The mean of the weights over the workers stays: every algorithm that moves weights, every topology, 2 to 24 workers."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from gossamer import Gossip, GossipGraD, GossipPGA, LowPrecisionDecentralized, PushSum, QuantizedGossip
from gossamer.algorithms import Algorithm, DecentralizedSGD, registry
from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.difference import computed
from gossamer.codecs import ErrorFeedback
from gossamer.codecs.contraction import contraction
from gossamer.codecs.wire import narrow
from gossamer.comm.digraph import RandomPush
from gossamer.comm.operations import carry_out
from gossamer.comm.ops import Flow, Start, Wait
from gossamer.comm.topology import FAMILY, Hypercube, Ring, Topology, rotated
from gossamer.state import State

from . import cases as contract_cases
from .cases import all_codecs, bucket_of, exchange, noise

TOPOLOGIES: list[Topology] = [*FAMILY, *(rotated(topology, seed=3) for topology in FAMILY)]
WIRES = ("fp32", "fp16", "bf16")
CODECS = [codec for codec in all_codecs() if not isinstance(codec, ErrorFeedback) and contraction(codec) > 0]
STEPS = 3
"""One that averages exactly or in full precision, and two that do what the algorithm is for."""

worlds = pytest.mark.parametrize("world", contract_cases.EVERY_WORLD)


def serves(topology: Topology, world: int) -> bool:
    inner = getattr(topology, "topology", topology)
    return not isinstance(inner, Hypercube) or world & (world - 1) == 0


def members(topology: Topology, world: int, turn: int) -> list[Algorithm]:
    """One of each algorithm that takes the topology; wires, bits and codecs take turns, so that each meets all of them."""
    wire = WIRES[turn % 3]
    found: list[Algorithm] = [
        Gossip(wire=wire, topology=topology),
        GossipPGA(wire=wire, topology=topology, period=3),
        GossipGraD(wire=wire, topology=topology),
        DecentralizedSGD(wire=wire, topology=topology),
        PushSum(wire=wire, topology=topology),
        QuantizedGossip(bits=(8, 4)[turn % 2], topology=topology),
    ]
    if topology.cycle(world) == 1:
        codec = CODECS[turn % len(CODECS)]
        found.append(LowPrecisionDecentralized(codec=codec, topology=topology, rate=0.3))
    return found


def cases(world: int) -> Iterator[Algorithm]:
    turns = count(world)
    for topology in TOPOLOGIES:
        if serves(topology, world):
            yield from members(topology, world, next(turns))


def side_by_side(flows: list[Flow[Tensor]]) -> list[Tensor]:
    """What one flow of all ranks returns, carried out in step: loopback without its threads, for thousands of exchanges."""
    replies: list[Any] = [None] * len(flows)
    while True:
        commands, results = [], []
        for flow, reply in zip(flows, replies, strict=True):
            try:
                commands.append(flow.send(reply))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            assert not commands, "a rank has ended before the others"
            return results
        if isinstance(commands[0], Start):
            replies = carry_out([command.op for command in commands])
        else:
            replies = [command.handle if isinstance(command, Wait) else command.fn() for command in commands]


def gossip(algorithm: Algorithm, tensors: list[Tensor], steps: int) -> list[Tensor]:
    """What weights become, rank by rank, when nothing but ``algorithm`` moves them."""
    world, weights = range(len(tensors)), [tensor.clone() for tensor in tensors]
    buckets = [bucket_of([tuple(tensor.shape)], tensor.dtype) for tensor in tensors]
    states = [State(bucket.flat) for bucket in buckets]
    for step in range(steps):
        for bucket, own in zip(buckets, weights, strict=True):
            narrow(bucket.flat, own)
        contexts = [Context(step, rank, tuple(world)) for rank in world]
        for rank, delta in enumerate(side_by_side([algorithm.exchange(buckets[r], states[r], contexts[r]) for r in world])):
            weights[rank] += computed(delta, weights[rank].dtype)
            states[rank].commit()
    return weights


def test_side_by_side_is_loopback() -> None:
    tensors = noise(5, 24, torch.float64)
    for algorithm in members(Ring(), 5, 1):
        assert all(map(torch.equal, gossip(algorithm, tensors, STEPS), contract_cases.gossip(algorithm, tensors, STEPS)))


@worlds
def test_the_mean_of_the_weights_stays(world: int) -> None:
    """To the rounding of float64, whatever is on the wire; and the workers have moved."""
    tensors = noise(world, 24, torch.float64)
    before = torch.stack(tensors)
    for algorithm in cases(world):
        after = torch.stack(gossip(algorithm, tensors, STEPS))
        assert (after.mean(0) - before.mean(0)).abs().max() < 1e-12, algorithm
        assert (after - before).abs().max() > 1e-3, algorithm


@worlds
def test_sums_and_weights_of_push_sum_stay_where_ranks_send_to_whom_they_like(world: int) -> None:
    """There the mean itself moves on the way."""
    tensors = noise(world, 24, torch.float64)
    for wire, peers in zip(WIRES, (1, 2, 5), strict=True):
        outcomes = exchange(PushSum(wire=wire, topology=RandomPush(peers=peers, seed=world)), [tensors])
        sums = torch.stack([outcome.state["push-sum"] for outcome in outcomes])
        shares = torch.stack([outcome.state.extra("push-sum weight") for outcome in outcomes])
        assert (sums.sum(0) - torch.stack(tensors).sum(0)).abs().max() < 1e-12
        assert abs(shares.sum() - world) < 1e-12


def test_no_algorithm_that_takes_a_topology_is_left_out() -> None:
    known = {type(algorithm).__name__ for world in range(2, 25) for algorithm in cases(world)}
    assert known == {name for name, cls in registry().items() if "topology" in cls.__dataclass_fields__}


def test_every_codec_and_wire_meets_every_topology() -> None:
    met = [algorithm for world in range(2, 25) for algorithm in cases(world)]
    for topology in TOPOLOGIES:
        mine = [algorithm for algorithm in met if algorithm.topology == topology]
        if len(mine) > 60:  # a hypercube has few worlds
            assert {algorithm.wire for algorithm in mine if isinstance(algorithm, Gossip)} == set(WIRES)
    used = {repr(algorithm.codec) for algorithm in met if isinstance(algorithm, LowPrecisionDecentralized)}
    assert used == set(map(repr, CODECS))
