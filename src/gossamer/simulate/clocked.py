"""Clocked runner: carries out flows in virtual time, on ``meta`` tensors, and prices every operation.

The third interpreter of the one vocabulary (:mod:`gossamer.comm.ops`). All ranks do the same, so one is executed: rank 0.
Where ranks differ in what they send (one has a bye), an operation takes as long as for the busiest, with whom the others
keep pace; what is counted is rank 0's. What a flow computes between its operations takes no time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.comm import ops
from gossamer.comm.ops import Decide, Flow, Group, Op, Start, Traffic, Wait
from gossamer.comm.runner import Meter, alone
from gossamer.comm.shaper import Shaper
from gossamer.simulate.clock import Clock, Event, Process
from gossamer.simulate.profile import Link
from gossamer.simulate.sharing import crossing


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A started operation: when it will be done, and what it then gives."""

    due: float
    result: Tensor


class Wire:
    """One machine's link, shared by its lanes: payloads queue behind each other, latencies overlap.

    Ranks on one machine (``nodes``; none: each has its own) share it, and reach each other over a second one, ``inside``. An
    operation in which some messages leave a machine takes as long as those of the machine that sends, or receives, most.
    """

    def __init__(self, clock: Clock, link: Link, world: int, nodes: tuple[Group, ...] = (), inside: Link | None = None) -> None:
        self.meter, self.most_bytes, self.inside_bytes = Meter(), 0, 0
        self._clock, self._everyone = clock, tuple(range(world))
        self._queue = Shaper(link.bandwidth, link.latency)
        inside = inside or Link()
        self._inside = Shaper(inside.bandwidth, inside.latency)
        self._machines = {rank: number for number, node in enumerate(nodes) for rank in node}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self._everyone)

    def start(self, op: Op, group: Group | None = None) -> UnderWay:
        """Hand an operation over now. As on the real wire, empty tensors are not sent."""
        group = self._everyone if group is None else group
        traffic = op.traffic(len(group))
        self.meter.count(op, len(group), group.index(0))
        between = crossing(op, [self._machines[rank] for rank in group]) if self._machines else traffic.bytes
        queue = self._queue if between else self._inside
        if between:
            traffic = Traffic(between, traffic.rounds)
            self.most_bytes += between
        else:
            self.inside_bytes += traffic.bytes
        empty = op.tensor.numel() == 0
        due = self._clock.now if empty else queue.due(traffic, self._clock.now)
        return UnderWay(due, result(op, len(group)))


def result(op: Op, world: int) -> Tensor:
    """The result of an operation among ``world`` ranks, without its values."""
    if world == 1:
        return alone(op)
    return op.tensor if isinstance(op, ops.AllReduce | ops.Broadcast) else ops.result_like(op, world)


class Lane:
    """One ordered queue of flows. A flow may have several operations outstanding; the lane goes on when it ends."""

    def __init__(self, clock: Clock, wire: Wire) -> None:
        self._wire = wire
        self._jobs: deque[tuple[Callable[[], Flow[Any]], Event]] = deque()
        self._came = Event()
        clock.spawn(self._work())

    def submit(self, make_flow: Callable[[], Flow[Any]]) -> Event:
        """Queue a flow; the event is its end."""
        done = Event()
        self._jobs.append((make_flow, done))
        self._came.set()
        return done

    def _work(self) -> Process:
        while True:
            while self._jobs:
                make_flow, done = self._jobs.popleft()
                yield from self._carry_out(make_flow())
                done.set()
            self._came = Event()
            yield self._came

    def _carry_out(self, flow: Flow[Any]) -> Process:
        reply: Any = None
        while True:
            try:
                command = flow.send(reply)
            except StopIteration:
                return
            if isinstance(command, Wait):
                yield command.handle.due
                reply = command.handle.result
            elif isinstance(command, Start):
                reply = self._wire.start(command.op, command.group)
            elif isinstance(command, Decide):
                reply = command.default
            else:
                raise TypeError(f"an algorithm yielded {command!r}; only start(op), wait(handle) and decide(…) are known")
