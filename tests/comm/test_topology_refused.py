"""Topologies that are none: refused when they are made, or before training begins, and never by an error of Python's own."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import gossamer
from gossamer import ConfigurationError, Gossip
from gossamer.algorithms import PushSum, after
from gossamer.comm.digraph import Digraph, OutNeighbours, RandomPush
from gossamer.comm.mixing import check_connected, check_pattern
from gossamer.comm.topology import Exchange, Pattern, Permutation, RandomMatching, Ring, Topology, exchange, rotated, shift


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: rotated(Ring), r"rotated\(\) takes a topology of permutations, such as Ring\(\); got <class"),
        (lambda: rotated("ring"), "got 'ring'"),
        (lambda: PushSum(topology=rotated(RandomPush())), r"got RandomPush\(peers=1, seed=0\)"),
        (lambda: rotated(Ring(), seed="a"), "seed must be an integer; got 'a'"),
        (lambda: rotated(Ring(), seed=True), "got True"),
        (lambda: RandomMatching(seed=1.5), "seed must be an integer; got 1.5"),
        (lambda: RandomPush(seed="x"), "seed must be an integer; got 'x'"),
        (lambda: RandomPush(peers=0), "peers must be"),
        (lambda: Ring(directed="yes"), "directed must be True or False"),
        (lambda: OutNeighbours(((1,), (1,))), "rank 1 sends to .*: it must be a tuple of other ranks below 2"),
        (lambda: OutNeighbours(5), "a digraph is a tuple"),
        (lambda: OutNeighbours((1, 0)), "rank 0 sends to 1"),
        (lambda: OutNeighbours(((1.0,), (0,))), "rank 0 sends to"),
        (lambda: OutNeighbours((("a", 1), (0,))), "rank 0 sends to"),
        (lambda: OutNeighbours(((1,), (2,), (0,))).at(0, 4), "is for 3 ranks; there are 4"),
        (lambda: Permutation([1, 0]), "not a permutation"),
        (lambda: Permutation((1.0, 0.0)), "not a permutation"),
        (lambda: Permutation("ab"), "not a permutation"),
        (lambda: Permutation(2), "not a permutation"),
        (lambda: exchange(4, [shift(1, 3)]), "an exchange among 4 ranks is made of permutations of as many"),
        (lambda: exchange(4, [shift(0, 3)]), "permutations of as many"),
        (lambda: exchange(2, [(1, 0)]), r"got \(1, 0\)"),
    ],
)
def test_what_is_none_is_refused_where_it_is_made(make: Callable[[], Any], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        make()


@dataclass(frozen=True)
class Returning(Topology):
    """Whatever it is given, from some step on; before, a ring."""

    edges: Any
    begin: int = 0
    length: Any = 4

    def at(self, step: int, world: int) -> Exchange:
        return self.edges if step >= self.begin else Ring().at(step, world)

    def cycle(self, world: int) -> int:
        return self.length


@dataclass(frozen=True)
class ReturningDirected(Pattern):
    """The same, where a digraph would do."""

    edges: Any

    def at(self, step: int, world: int) -> Any:
        return self.edges


NONE_OF_THREE = [
    (shift(1, 3), "must return an Exchange .*; got Permutation"),
    (Digraph(((1,), (2,), (0,))), "must return an Exchange .*; got Digraph"),
    (exchange(4, [shift(1, 4)]), "must return an Exchange of 3 ranks; got Exchange"),
    (None, "got None"),
]


@pytest.mark.parametrize(("edges", "said"), NONE_OF_THREE)
@pytest.mark.parametrize("begin", [0, 3])
def test_the_first_cycle_of_a_topology_is_looked_at(edges: Any, said: str, begin: int) -> None:
    """The last of its steps too, though all are connected before."""
    topology = Returning(edges, begin)
    for check in (lambda: check_connected(topology, 3), lambda: after(5, Gossip(topology=topology)).check(3)):
        with pytest.raises(ConfigurationError, match=said):
            check()
    check_pattern(Returning(edges, 4), 3)


@pytest.mark.parametrize("length", [0, -1, 2.0, None])
def test_a_cycle_is_a_number_of_steps(length: Any) -> None:
    with pytest.raises(ConfigurationError, match="must return a number of steps"):
        Gossip(topology=Returning(None, 9, length)).check(3)


def test_a_directed_pattern_may_be_either() -> None:
    PushSum(topology=ReturningDirected(Digraph(((1,), (2,), (0,))))).check(3)
    PushSum(topology=ReturningDirected(exchange(3, [shift(1, 3)]))).check(3)
    for edges in (shift(1, 3), [[1], [2], [0]], Digraph(((1,), (0,)))):
        with pytest.raises(ConfigurationError, match="must return an Exchange or Digraph"):
            PushSum(topology=ReturningDirected(edges)).check(3)


def test_training_does_not_begin_with_one() -> None:
    def body(rank: int) -> None:
        model = torch.nn.Linear(2, 1)
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), Gossip(topology=Returning(shift(1, 3))))

    with pytest.raises(ConfigurationError, match=r"Gossip: Returning.*must return an Exchange"):
        gossamer.loopback(body, 3)
