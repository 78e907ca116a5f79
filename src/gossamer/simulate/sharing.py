"""Sharing: what the ranks of a machine, and the machines of a site, together send or receive over the one link they have."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, singledispatch

import numpy as np
import numpy.typing as npt

from gossamer.comm.operations import Traffic
from gossamer.comm.ops import AllGather, AllReduce, AllToAll, Broadcast, Op, Permute, Push
from gossamer.simulate.forms import least
from gossamer.simulate.profile import Link

Ranks = npt.NDArray[np.int64]
NOTHING = Traffic(0, 0)


@dataclass(frozen=True, eq=False)
class Members:
    """Where each member of a group is: its unit at every level, the outermost first (sites, machines)."""

    levels: tuple[Ranks, ...]

    @property
    def ranks(self) -> int:
        """How many there are."""
        return len(self.levels[0])

    @cached_property
    def known(self) -> dict[tuple[int, int], tuple[object, int]]:
        """By level and pattern of an operation: the pattern, and how many messages cross the busiest link there."""
        return {}

    @cached_property
    def units(self) -> tuple[int, ...]:
        """How many units there are at each level, and at last ranks."""
        return (*(len(np.unique(level)) for level in self.levels), self.ranks)


def traffic_of(op: Op, members: Members, links: Sequence[Link]) -> list[Traffic]:
    """What crosses the link of the busiest unit of every level, and at last what stays inside machines. ``links``: of each."""
    units = members.units
    if isinstance(op, AllReduce) and members.ranks > 1:
        return _of_all_reduce(op, members, links)
    traffic, found = op.traffic(members.ranks), []
    rounds = traffic.rounds
    for place, number in enumerate(units[:-1]):
        crossed = 0 if number == 1 else traffic.bytes if number == members.ranks else crossed_at(op, members, place)
        found.append(Traffic(crossed, rounds if crossed else 0))  # the outermost link that is crossed is the one waited for
        rounds = 0 if crossed else rounds
    alone = not any(each.bytes for each in found) and units[-2] < members.ranks
    return [*found, Traffic(traffic.bytes, rounds) if alone else NOTHING]


def _of_all_reduce(op: AllReduce, members: Members, links: Sequence[Link]) -> list[Traffic]:
    """A ring passes through the units of a level before it leaves theirs: the hops between machines are as many as these. The
    other forms are of one rank of each unit; its others pass their sums to it, and the result back, one by one."""
    units = members.units
    outermost = next(place for place, number in enumerate(units) if number > 1)
    link = links[outermost]
    form, traffic = least(link.transport.all_reduce, op.nbytes, units[outermost], link.seconds)
    found = [NOTHING] * outermost
    if outermost == len(members.levels) or form != "ring" or units[outermost] == members.ranks:
        found.append(traffic)
    else:
        found.append(Traffic(crossed_at(op, members, outermost), traffic.rounds))
    for place in range(outermost + 1, len(units)):
        more = units[place] - units[place - 1]
        if more == 0:
            found.append(NOTHING)
        elif form == "ring":
            last = place == len(members.levels)
            sent = op.traffic(members.ranks).bytes if last else crossed_at(op, members, place)
            found.append(Traffic(sent, 2 * more))
        else:
            found.append(_to_one(op.nbytes, members, place))
    return found


def _to_one(nbytes: int, members: Members, place: int) -> Traffic:
    """All units of a level that are in one of the next outer level send to one of them, and back."""
    outer = members.levels[place - 1]
    inner = np.arange(members.ranks) if place == len(members.levels) else members.levels[place]
    _, first = np.unique(inner, return_index=True)
    most = int(np.unique(outer[first], return_counts=True)[1].max())
    return Traffic(2 * nbytes, 2 * (most - 1))


_BROADCASTS: dict[int, object] = {}
"""By source, an object for the pattern of these."""


def crossed_at(op: Op, members: Members, place: int) -> int:
    """Bytes that cross the link of the busiest unit of a level; messages of a pattern are counted once."""
    pattern = pattern_of(op)
    if (place, id(pattern)) not in members.known:
        members.known[place, id(pattern)] = pattern, messages_across(op, members.levels[place])
    return _bytes_of_message(op, members.ranks) * members.known[place, id(pattern)][1]


def crossing(op: Op, machines: Sequence[int] | Ranks) -> int:
    """Bytes that cross the link of the busiest machine, in its busier direction; ``machines``: that of each member."""
    return _bytes_of_message(op, len(machines)) * messages_across(op, np.asarray(machines))


def pattern_of(op: Op) -> object:
    """What decides who sends to whom: an object that all operations alike share."""
    if isinstance(op, Broadcast):
        return _BROADCASTS.setdefault(op.source, (op.source,))
    return op.permutation if isinstance(op, Permute) else op.graph if isinstance(op, Push) else type(op)


def _bytes_of_message(op: Op, ranks: int) -> int:
    if isinstance(op, AllReduce):
        return op.traffic(ranks).bytes
    return op.nbytes // ranks if isinstance(op, AllToAll) else op.nbytes


@singledispatch
def messages_across(op: Op, machines: Ranks) -> int:
    """How many messages cross the link of the busiest machine, in its busier direction."""
    raise TypeError(f"the simulation does not know {op}")


@messages_across.register
def _(op: AllReduce, machines: Ranks) -> int:
    """A ring in order of the ranks: from a machine whose ranks follow each other, one of them sends to another one."""
    return _most(machines, np.roll(machines, -1))


@messages_across.register
def _(op: Permute, machines: Ranks) -> int:
    return _most(machines, machines[np.array(op.permutation.to)])


@messages_across.register
def _(op: Push, machines: Ranks) -> int:
    edges = np.array([(rank, to) for rank, targets in enumerate(op.graph.to) for to in targets]).reshape(-1, 2)
    return _most(machines[edges[:, 0]], machines[edges[:, 1]])


@messages_across.register
def _(op: AllToAll | AllGather, machines: Ranks) -> int:
    """As many as there are pairs of a rank of the machine and one of another."""
    here = np.unique(machines, return_counts=True)[1]
    return int((here * (len(machines) - here)).max())


@messages_across.register
def _(op: Broadcast, machines: Ranks) -> int:
    world = len(machines)
    edges = np.array([(rank, to) for rank in range(world) for to in op.receivers(world, rank)]).reshape(-1, 2)
    return _most(machines[edges[:, 0]], machines[edges[:, 1]])


def _most(sender: Ranks, receiver: Ranks) -> int:
    """How many messages leave the machine that most of them leave, or reach the one that most of them reach."""
    between = sender != receiver
    ends = [np.unique(each[between], return_counts=True)[1] for each in (sender, receiver)]
    return max((int(counts.max()) for counts in ends if len(counts)), default=0)
