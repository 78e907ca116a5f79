"""Clocked runner: carries out flows in virtual time, on ``meta`` tensors, and prices every operation.

The third interpreter of the one vocabulary (:mod:`gossamer.comm.ops`). All ranks do the same, so one is executed: rank 0.
Where ranks differ in what they send (one has a bye), an operation takes as long as for the busiest, with whom the others
keep pace; what is counted is rank 0's. What a flow computes between its operations takes no time.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from gossamer.comm import ops
from gossamer.comm.flow import Begun
from gossamer.comm.ops import Decide, Flow, Group, Op, Traffic
from gossamer.comm.runner import CONTROL, Meter, Runner, Ticket
from gossamer.simulate.clock import Clock, Event, Process, both
from gossamer.simulate.line import SharedLine
from gossamer.simulate.profile import Link
from gossamer.simulate.sharing import traffic_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A started operation: its end, and what it then gives."""

    done: Event
    result: Tensor


class Wire:
    """One machine's link, a port that all lanes share: payloads under way share the rate, latencies overlap.

    Ranks on one machine (``nodes``; none: each has its own) share it, and reach each other over a second one, ``inside``. An
    operation in which some messages leave a machine takes as long as those of the machine that sends, or receives, most.
    """

    def __init__(self, clock: Clock, link: Link, world: int, nodes: tuple[Group, ...] = (), inside: Link | None = None) -> None:
        self.meter, self.most_bytes, self.inside_bytes = Meter(), 0, 0
        self.everyone = tuple(range(world))
        self._between, self._inside = SharedLine(clock, link), SharedLine(clock, inside or Link())
        self._machines = {rank: number for number, node in enumerate(nodes) for rank in node}

    def start(self, op: Op, group: Group | None = None) -> UnderWay:
        """Hand an operation over now. As on the real wire, empty tensors are not sent."""
        group = self.everyone if group is None else group
        self.meter.count(op, len(group), group.index(0))
        machines = [self._machines.get(rank, rank) for rank in group]
        if op.tensor.numel() == 0:
            between = inside = Traffic(0, 0)
        else:
            between, inside = traffic_of(op, machines, self._between.link, self._inside.link)
        self.most_bytes += between.bytes
        self.inside_bytes += inside.bytes
        waits = inside.rounds * self._inside.link.latency
        done = both(self._between.send(between, waits), self._inside.send(Traffic(inside.bytes, 0)))
        return UnderWay(done, echoed(op, len(group)))

    def wait(self, handle: UnderWay) -> Tensor:
        """What it gives. That its moment has come is the lane's part."""
        return handle.result

    def decide(self, decision: Decide) -> Any:
        """There are no values to look at: the default."""
        return decision.default


def echoed(op: Op, world: int) -> Tensor:
    """The result of an operation on rank 0 of ``world`` ranks that all bring the same. On ``meta`` that is its shape; the
    small agreements, which lie on the host, have values."""
    tensor = op.tensor
    if isinstance(op, ops.AllReduce):
        return tensor.mul_(world) if op.reduce == "sum" else tensor
    if isinstance(op, ops.Broadcast):
        return tensor
    if isinstance(op, ops.Permute):
        return tensor.clone() if op.into is None else op.into.copy_(tensor)
    if isinstance(op, ops.Push):
        return tensor.expand(len(op.graph.sources(0)), *tensor.shape).contiguous()
    if isinstance(op, ops.AllToAll):
        return tensor[:1].expand_as(tensor).contiguous()
    if isinstance(op, ops.AllGather):
        return tensor.expand(world, *tensor.shape).contiguous()
    raise TypeError(f"the simulation does not know {op}")


class Lane:
    """One ordered queue of flows. A flow may have several operations outstanding; the lane goes on when it ends."""

    def __init__(self, clock: Clock, wire: Wire) -> None:
        self._wire = wire
        self._jobs: deque[tuple[Callable[[], Flow[Any]], Ticket[Any]]] = deque()
        self._came = Event()
        clock.spawn(self._work())

    def submit(self, make_flow: Callable[[], Flow[T]], ticket: Ticket[T]) -> None:
        """Queue a flow."""
        self._jobs.append((make_flow, ticket))
        self._came.set()

    def _work(self) -> Process:
        while True:
            while self._jobs:
                make_flow, ticket = self._jobs.popleft()
                ticket.begun = True
                begun = Begun(make_flow(), self._wire)
                while not begun.ended:
                    yield begun.handle.done
                    begun.go_on(self._wire.wait(begun.handle))
                ticket.result = begun.result
                ticket.conclude()
            self._came = Event()
            yield self._came


class ClockedRunner(Runner):
    """Rank 0's runner in virtual time, which passes where the program says that it computes, and where it waits.

    Prompt flows take turns on lanes like all others.
    """

    rank = 0

    def __init__(self, clock: Clock, wire: Wire, lanes: int, nodes: tuple[Group, ...] | None = None) -> None:
        self.world, self.lanes, self.nodes = len(wire.everyone), lanes, nodes
        self.exposed_seconds = 0.0
        """Seconds that the program has waited for flows."""
        self.submitted = 0
        """Flows that were given to data lanes."""
        self._clock, self._wire = clock, wire
        self._data = [Lane(clock, wire) for _ in range(lanes)]
        self._control = Lane(clock, wire)
        self._tickets = 0

    @property
    def members(self) -> tuple[int, ...]:
        return self._wire.everyone

    def now(self) -> float:
        return self._clock.now

    def compute(self, seconds: float) -> None:
        """The program computes for so long; flows go on meanwhile."""
        self._clock.advance(self._clock.now + seconds)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        ticket: Ticket[T] = Ticket(self._tickets, label)
        self._tickets += 1
        self.submitted += lane != CONTROL
        (self._control if lane == CONTROL else self._data[lane]).submit(make_flow, ticket)
        return ticket

    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        begin = self._clock.now
        self._clock.run_until(ticket.done.is_set)
        self.exposed_seconds += self._clock.now - begin
        return ticket.result  # type: ignore[return-value]

    def arrived(self, ticket: Ticket[Any]) -> bool:
        self._clock.advance(self._clock.now)
        return ticket.done.is_set()

    def meters(self) -> list[Meter]:
        return [self._wire.meter]
