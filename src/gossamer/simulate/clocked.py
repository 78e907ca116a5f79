"""Clocked runner: carries out flows in virtual time, on ``meta`` tensors, and prices every operation.

The third interpreter of the one vocabulary (:mod:`gossamer.comm.ops`). All ranks do the same, so one is executed: rank 0.
Where ranks differ in what they send (one has a bye), an operation takes as long as for the busiest, with whom the others
keep pace; what is counted is rank 0's. What a flow computes between its operations takes the time of a processor, if one is
described. What the loop did, and in which order, is recorded for those whose clocks differ.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, TypeVar

from torch import Tensor

from gossamer.comm.echo import echoed
from gossamer.comm.operations import Traffic
from gossamer.comm.ops import Broadcast, Decide, Flow, Group, Op, Permute, Push, Start, Wait, answer
from gossamer.comm.runner import CONTROL, Meter, Runner, Ticket
from gossamer.simulate.alike import AlikeExchanges, Ended
from gossamer.simulate.clock import Clock, Event, Process, both
from gossamer.simulate.levels import Levels
from gossamer.simulate.line import SharedLine
from gossamer.simulate.processor import Processing
from gossamer.simulate.program import FlowRecord, Operation, Recorder
from gossamer.simulate.sharing import traffic_of
from gossamer.simulate.trace import LINKS, is_collecting, tell

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A started operation: its end, what is recorded of it, and what it then gives."""

    done: Event
    operation: Operation
    give: Callable[[], Tensor]


@dataclass(frozen=True, slots=True)
class Price:
    """What an operation among some ranks sends: the ``message`` of rank 0, what stays ``inside`` machines, the ``links``
    that are crossed and by what, the seconds that all rounds wait, those of the busiest link, and the bytes and messages of the
    transport's own work. ``pattern``: what it is known by."""

    pattern: Any
    message: Traffic
    inside: int
    links: list[tuple[str, SharedLine, Traffic]]
    waits: float
    busiest: float
    transport: tuple[int, int]


class Wire:
    """The links of rank 0's machine, a port that all lanes share: payloads under way share the rate, latencies overlap.

    Ranks on one machine share its link, and machines of one site that of the site. An operation takes as long as the messages
    of the unit that sends, or receives, most at any level.
    """

    def __init__(self, clock: Clock, levels: Levels, processing: Processing, records: bool = True) -> None:
        """``records``: whether what flows do is recorded."""
        self.records, self._traced = records, is_collecting()
        self.meter, self.most_seconds, self.inside_bytes = Meter(), 0.0, 0
        self.everyone = tuple(range(levels.world))
        self.processing = processing
        self._clock = clock
        self._levels = levels
        self._lines = [SharedLine(clock, link) for link in levels.links]
        self._prices: dict[Any, Price] = {}

    def start(self, op: Op, group: Group | None = None) -> UnderWay:
        """Hand an operation over now. As on the real wire, empty tensors are not sent."""
        everyone = group is None or group is self.everyone or group == self.everyone
        members = self.everyone if group is None or everyone else group
        sent = op.tensor.numel() > 0 and len(members) > 1
        operation = Operation(op, None if everyone else group, sent)
        done = self._send(op, self._price(op, members, everyone)) if sent else Event()
        if not sent:
            self.meter.count(op, len(members), members.index(0))
            done.set()
        elif self.records:
            self._note_end(operation, done)
        give = partial(echoed, op, len(members))
        if self.processing.costs:
            result = give()  # which counts as a copy, at its start
            return UnderWay(done, operation, lambda: result)
        return UnderWay(done, operation, give)

    def _price(self, op: Op, members: Group, everyone: bool) -> Price:
        """Of operations of all, known by their kind, pattern and shape: large models have thousands that are alike."""
        pattern = _pattern(op)
        key = type(op), id(pattern), op.tensor.shape, op.tensor.dtype
        if everyone and (known := self._prices.get(key)) is not None:
            return known
        world = len(members)
        traffic = traffic_of(op, self._levels.members(members), self._levels.links)
        links = list(zip(LINKS[-len(self._lines) :], self._lines, traffic, strict=True))
        price = Price(
            pattern,
            op.sent(world, members.index(0)),
            traffic[-1].bytes,
            [link for link in links if link[-1].bytes] or [(*links[0][:2], Traffic(0, 0))],
            sum(each.rounds * line.link.latency for each, line in zip(traffic, self._lines, strict=True)),
            max(8 * each.bytes / line.link.goodput for each, line in zip(traffic[:-1], self._lines[:-1], strict=True)),
            (op.traffic(world).bytes, op.messages(world)),
        )
        if everyone:
            self._prices[key] = price
        return price

    def _send(self, op: Op, price: Price) -> Event:
        """All levels at the same time: the bytes of each share its link, and the rounds of all follow each other."""
        self.meter.add(price.message)
        self.inside_bytes += price.inside
        self.most_seconds += price.busiest
        done = [line.send(traffic, price.waits) for _, line, traffic in price.links]
        if self._traced:
            for (row, _, _), event in zip(price.links, done, strict=True):
                self._tell_end(row, op, event)
        sent = reduce(both, done)
        return both(sent, self.processing.transport(*price.transport)) if self.processing.costs else sent

    def _tell_end(self, row: str, op: Op, done: Event) -> None:
        """Tell a trace when the transfer has ended."""
        begin = self._clock.now
        if not done.happened:
            done.then(lambda: tell(row, f"{type(op).__name__}, {op.nbytes / 1e6:.3g} MB", begin, self._clock.now))

    def _note_end(self, operation: Operation, done: Event) -> None:
        begin = self._clock.now
        if not done.happened:
            done.then(lambda: setattr(operation, "seconds", self._clock.now - begin))

    def wait(self, handle: UnderWay) -> Tensor:
        """What it gives. That its moment has come is the lane's part."""
        return handle.give()

    def decide(self, decision: Decide) -> Any:
        """There are no values to look at: the default."""
        return decision.default


def _pattern(op: Op) -> Any:
    """Who sends to whom, where the kind of an operation does not say it."""
    if isinstance(op, Permute):
        return op.permutation
    if isinstance(op, Push):
        return op.graph
    return op.source if isinstance(op, Broadcast) else None


class Lane:
    """One ordered queue of flows. A flow may have several operations outstanding; the lane goes on when it ends."""

    def __init__(self, clock: Clock, wire: Wire, number: int) -> None:
        self._clock, self._wire, self._number = clock, wire, number
        self._jobs: deque[tuple[Callable[[], Flow[Any]], Ticket[Any], FlowRecord]] = deque()
        self._came = Event()
        clock.spawn(self._work())

    def submit(self, make_flow: Callable[[], Flow[T]], ticket: Ticket[T]) -> FlowRecord:
        """Queue a flow."""
        record = FlowRecord(self._number)
        self._jobs.append((make_flow, ticket, record))
        self._came.set()
        return record

    def _work(self) -> Process:
        while True:
            while self._jobs:
                make_flow, ticket, record = self._jobs.popleft()
                ticket.begun = True
                yield from self._carry_out(make_flow(), ticket, record)
                ticket.conclude()
            self._came = Event()
            yield self._came

    def _carry_out(self, flow: Flow[Any], ticket: Ticket[Any], record: FlowRecord) -> Process:
        reply: Any = None
        wire, processing = self._wire, self._wire.processing
        send = processing.counted(flow.send) if processing.costs else flow.send
        while True:
            try:
                command = send(reply)
            except StopIteration as stop:
                command, ticket.result = None, stop.value
            if processing.of_flow > 0:
                begin = self._clock.now
                yield processing.serve(processing.of_flow)
                record.work(self._clock.now - begin)
                tell("codecs and copies", ticket.label, begin, self._clock.now)
            if command is None:
                return
            if isinstance(command, Wait):
                if wire.records:
                    record.wait(command.handle.operation)
                yield command.handle.done
                reply = None if isinstance(command, Ended) else command.handle.give()
            else:
                reply = answer(command, wire)
                if wire.records and isinstance(command, Start):
                    record.start(reply.operation)


class ClockedRunner(Runner):
    """Rank 0's runner in virtual time, which passes where the program says that it computes, and where it waits.

    Prompt flows take turns on lanes like all others.
    """

    rank = 0

    def __init__(self, clock: Clock, wire: Wire, lanes: int, nodes: tuple[Group, ...] | None = None, may_lag: int = 0) -> None:
        """``may_lag``: by how many steps exchanges may be late."""
        self.world, self.lanes, self.nodes = len(wire.everyone), lanes, nodes
        self.exposed_seconds = 0.0
        """Seconds that the program has waited for flows."""
        self.submitted = 0
        """Flows that were given to data lanes."""
        self.recorder = Recorder()
        self._clock, self._wire, self._may_lag = clock, wire, may_lag
        self._data = [Lane(clock, wire, number) for number in range(lanes)]
        self._control = Lane(clock, wire, CONTROL)
        self._begun_in: dict[int, int] = {}
        """Of each ticket, the step in which it was submitted."""
        self._tickets = 0
        self._alike = AlikeExchanges(wire.processing)

    @property
    def members(self) -> tuple[int, ...]:
        return self._wire.everyone

    def now(self) -> float:
        return self._clock.now

    def compute(self, seconds: float) -> None:
        """The program computes for so long; flows go on meanwhile."""
        self._catch_up()
        begin = self._clock.now
        self._wire.processing.compute(seconds)
        self.recorder.compute(seconds, self._clock.now - begin)
        tell("compute", "compute", begin, self._clock.now)

    def flow_of(self, exchange: Callable[..., Flow[T]], *given: Any) -> Flow[T]:
        """The flow of an exchange, or one that does what another of the same step has done."""
        return self._alike.flow(exchange, *given)

    def run_out(self) -> None:
        """Let all flows that were submitted end."""
        self._clock.run_out()

    def _catch_up(self) -> None:
        """Let the time pass that the loop's own copies take."""
        begin = self._clock.now
        self._wire.processing.work_off()
        self.recorder.compute(0.0, self._clock.now - begin)
        tell("codecs and copies", "packing and applying", begin, self._clock.now)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        self._catch_up()
        ticket: Ticket[T] = Ticket(self._tickets, label)
        self._begun_in[self._tickets] = self.recorder.number
        self._tickets += 1
        self.submitted += lane != CONTROL
        self.recorder.submit((self._control if lane == CONTROL else self._data[lane]).submit(make_flow, ticket))
        return ticket

    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        self._catch_up()
        begin = self._clock.now
        self._clock.run_until(ticket.done.is_set)
        self.exposed_seconds += self._clock.now - begin
        tell("waiting", ticket.label, begin, self._clock.now)
        since = self.recorder.number - self._begun_in.pop(ticket.sequence, self.recorder.number)
        self.recorder.wait(ticket.sequence, max(0, 1 + self._may_lag - since) if since else 0)
        return ticket.result  # type: ignore[return-value]

    def arrived(self, ticket: Ticket[Any]) -> bool:
        self._catch_up()
        self._clock.advance(self._clock.now)
        return ticket.done.is_set()

    def meters(self) -> list[Meter]:
        return [self._wire.meter]
