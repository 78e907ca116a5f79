"""Sharing: what the ranks of one machine together send, or receive, over the one link that it has."""

from collections import Counter
from collections.abc import Sequence
from functools import singledispatch
from itertools import pairwise

from gossamer.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Op, Permute, Push, Traffic
from gossamer.simulate.forms import least
from gossamer.simulate.profile import Link


def traffic_of(op: Op, machines: Sequence[int], link: Link, inside: Link) -> tuple[Traffic, Traffic]:
    """What crosses the link of the busiest machine, and what stays inside it. ``machines``: that of each member."""
    there, ranks = len(set(machines)), len(machines)
    if isinstance(op, AllReduce) and ranks > 1:
        return _of_all_reduce(op, machines, link, inside)
    traffic = op.traffic(ranks)
    if there == ranks:
        return traffic, Traffic(0, 0)
    between = crossing(op, machines)
    return (Traffic(between, traffic.rounds), Traffic(0, 0)) if between else (Traffic(0, 0), traffic)


def _of_all_reduce(op: AllReduce, machines: Sequence[int], link: Link, inside: Link) -> tuple[Traffic, Traffic]:
    """A ring passes through the ranks of a machine before it leaves it: the hops between machines are as many as these. The
    other forms are of one rank of each machine; its others pass their sums to it, and the result back, one by one."""
    there, ranks = len(set(machines)), len(machines)
    if there == 1:
        return Traffic(0, 0), least(inside.transport.all_reduce, op.nbytes, ranks, inside.seconds)[1]
    form, between = least(link.transport.all_reduce, op.nbytes, there, link.seconds)
    if ranks == there:
        return between, Traffic(0, 0)
    if form == "ring":
        bytes_on_each = op.traffic(ranks).bytes
        return Traffic(crossing(op, machines), between.rounds), Traffic(bytes_on_each, 2 * (ranks - there))
    most = max(Counter(machines).values())
    return between, Traffic(2 * op.nbytes, 2 * (most - 1))


@singledispatch
def crossing(op: Op, machines: Sequence[int]) -> int:
    """Bytes that cross the link of the busiest machine, in its busier direction; ``machines``: that of each member."""
    raise TypeError(f"the simulation does not know {op}")


@crossing.register
def _(op: AllReduce, machines: Sequence[int]) -> int:
    """A ring in order of the ranks: from a machine whose ranks follow each other, one of them sends to another one."""
    return op.traffic(len(machines)).bytes * _most(list(pairwise([*machines, machines[0]])))


@crossing.register
def _(op: Permute, machines: Sequence[int]) -> int:
    return op.nbytes * _most([(machines[rank], machines[to]) for rank, to in enumerate(op.permutation.to)])


@crossing.register
def _(op: Push, machines: Sequence[int]) -> int:
    return op.nbytes * _most([(machines[rank], machines[to]) for rank, targets in enumerate(op.graph.to) for to in targets])


@crossing.register
def _(op: AllToAll, machines: Sequence[int]) -> int:
    return op.nbytes // len(machines) * _most_pairs(machines)


@crossing.register
def _(op: AllGather, machines: Sequence[int]) -> int:
    return op.nbytes * _most_pairs(machines)


@crossing.register
def _(op: Broadcast, machines: Sequence[int]) -> int:
    world = len(machines)
    return op.nbytes * _most([(machines[rank], machines[to]) for rank in range(world) for to in op.receivers(world, rank)])


def _most(edges: Sequence[tuple[int, int]]) -> int:
    """How many of the edges leave the machine that most of them leave, or reach the one that most of them reach."""
    between = [edge for edge in edges if edge[0] != edge[1]]
    return max((count for ends in zip(*between, strict=True) for count in Counter(ends).values()), default=0)


def _most_pairs(machines: Sequence[int]) -> int:
    """How many (rank, rank of another machine) pairs there are for the machine that has most of them."""
    return max(here * (len(machines) - here) for here in Counter(machines).values())
