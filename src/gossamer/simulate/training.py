"""Training: a training loop in virtual time, which plans, launches and waits as the real one does.

Gradients as in :mod:`gossamer.sync.gradients`, weights as in :mod:`gossamer.sync.weights`: buckets in the plan's
order, on the lanes that the plan gives them, small agreements on a lane of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gossamer.algorithms.base import NOTHING, Algorithm, Context, finishes
from gossamer.buckets import Bucket, Plan
from gossamer.comm.ops import Flow, Group, maximum
from gossamer.simulate.clock import Clock, Event, Process
from gossamer.simulate.clocked import Lane, Wire
from gossamer.simulate.profile import Compute
from gossamer.state import State
from gossamer.sync.usage import USAGE

META = torch.device("meta")

MakeFlow = Callable[[], Flow[Any]]


class Part:
    """The buckets of what moves gradients, or weights; their states, and what is under way.

    Weights that may lag: an exchange is left alone for so many steps longer, until it has ended. All ranks are equally fast
    here, so that it only ever waits for the wire.
    """

    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm,
        lanes: int,
        members: tuple[int, ...],
        nodes: tuple[Group, ...],
        overtakes: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self._lanes = plan.lanes(lanes)
        self.buckets = [Bucket(index, replace(layout, device=META)) for index, layout in enumerate(plan.layouts)]
        self.under_way: list[Event] = []
        self.finishing: list[Event] = []
        self.cadence, self._overtakes = algorithm.cadence, overtakes
        self._handlers: list[Algorithm] = [bucket.layout.handler for bucket in self.buckets]
        self._states = [State(bucket.flat) for bucket in self.buckets]
        self._step_states = {bucket.layout.group: State(torch.zeros((), device=META)) for bucket in self.buckets}
        self._members, self._nodes = members, nodes
        self._number = self.exchanges = self._behind = 0

    @property
    def may_stay(self) -> bool:
        """Whether what is under way has not ended, and need not yet."""
        return self._behind < self.cadence.lag and not all(event.happened for event in self.under_way)

    @property
    def has_just_begun(self) -> bool:
        """Whether the exchange that is under way began at the end of the last step."""
        return bool(self.under_way) and self._behind == 0

    def begin(self, number: int, lanes: Sequence[Lane]) -> None:
        """Send the weights as they are before step ``number``, if they are due and the last exchange is over."""
        if self.under_way:
            self._behind += 1
        elif self.cadence.due(number):
            if self.cadence.lag:
                number = self.cadence.step_of(self.exchanges)
            self._behind, self.exchanges = 0, self.exchanges + 1
            for bucket in self.buckets:
                self.launch(bucket, number, lanes)

    def launch(self, bucket: Bucket, number: int, lanes: Sequence[Lane]) -> None:
        """Start the flow of one bucket."""
        handler, state, ctx = self._handlers[bucket.index], self._states[bucket.index], self._context(number)
        lane, self._number = lanes[self._lanes[bucket.index]], number
        due = handler.cadence.due(number)
        if self.algorithm.subject == "weights" and not due:
            return
        exchange = handler.exchange if due else NOTHING.exchange
        self.under_way.append(lane.submit(lambda: exchange(bucket, state, ctx)))

    def finish(self) -> Iterator[Flow[None]]:
        """What the algorithm does once per step, for the exchange that was launched last."""
        number = self._number
        for group, state in self._step_states.items():
            mine = [bucket for bucket in self.buckets if bucket.layout.group == group]
            handler = self._handlers[mine[0].index]
            if not finishes(handler) or not handler.cadence.due(number):
                continue
            flow = handler.finish(mine, [self._states[bucket.index] for bucket in mine], state, self._context(number))
            if flow is not None:
                yield flow

    def commit(self) -> None:
        """The step has succeeded."""
        self.under_way = []
        for state in (*self._states, *self._step_states.values()):
            state.commit()

    def _context(self, number: int) -> Context:
        return Context(number, 0, self._members, self._nodes, self._overtakes)


class Totals(NamedTuple):
    """What a run took."""

    seconds: float
    exposed: float
    """Seconds in which the loop stood still for communication."""
    sent: float
    """Bytes of this rank."""
    messages: float
    busiest: float
    """Bytes of the busiest rank, or machine."""
    inside: float
    """Bytes that leave no machine."""


class Training:
    """One rank's loop: its buckets, their state, its lanes, and the waits between them.

    ``preludes`` are flows that run, one after the other, before each forward pass.
    """

    def __init__(
        self,
        clock: Clock,
        wire: Wire,
        compute: Compute,
        lanes: int,
        gradients: Part | None,
        weights: Part | None,
        preludes: Sequence[MakeFlow],
        overlap_forward: bool,
    ) -> None:
        self.clock, self.wire = clock, wire
        self.exposed = 0.0
        self._compute, self._gradients, self._weights, self._preludes = compute, gradients, weights, preludes
        self._overlap = overlap_forward
        self._lanes = [Lane(clock, wire) for _ in range(lanes)]
        self._control = Lane(clock, wire)

    def step(self, number: int) -> Process:
        """One step, from the beginning of its forward pass to the end of the optimizer's work."""
        for make_flow in self._preludes:
            yield from self._wait([self._control.submit(make_flow)])
        if self._overlap and self._gradients is not None and self._gradients.under_way:
            yield from self._update_in_parts(self._gradients)
            begin = self.clock.now
        else:
            begin = self.clock.now + self._compute.forward
        due = self._gradients is not None and self._gradients.cadence.due(number)
        if self._gradients is not None and due:
            yield begin  # what finished the step before may take as long as this forward pass
            yield from self._wait(self._gradients.finishing)
            begin = self.clock.now
            yield from self._send_gradients(self._gradients, number, begin)
        yield begin + self._compute.backward
        if self._overlap and due:
            return
        if self._gradients is not None:
            yield from self._conclude(self._gradients)
        if self._weights is None:
            yield self.clock.now + self._compute.optimizer
            return
        late = self._weights.cadence.late
        if not late:
            yield from self._land(self._weights)
        yield self.clock.now + self._compute.optimizer
        if late or self._weights.cadence.lag:
            yield from self._land(self._weights)
        self._weights.begin(number + 1, self._lanes)

    def _update_in_parts(self, part: Part) -> Process:
        """A forward pass that waits for each bucket of the last step where it is needed first, and updates its parameters."""
        compute, begin = self._compute, self.clock.now
        total = sum(bucket.layout.nbytes for bucket in part.buckets)
        needs = [(compute.needed_at(bucket.layout.names), bucket.index) for bucket in part.buckets]
        usage = part.under_way[len(part.buckets) :]  # no result is a gradient before it is known who has one
        for moment, index in sorted(needs):
            yield begin + moment
            yield from self._wait([*usage, part.under_way[index]])
            yield self.clock.now + compute.optimizer * part.buckets[index].layout.nbytes / max(1, total)
            begin = self.clock.now - moment
        yield begin + compute.forward
        yield from self._finish(part)

    def _send_gradients(self, part: Part, number: int, begin: float) -> Process:
        """Buckets leave during backward; its end waits for them and for the agreement on which parameters were used."""
        for bucket in part.buckets:
            yield begin + self._compute.ready_at(bucket.layout.names)
            part.launch(bucket, number, self._lanes)
        yield begin + self._compute.backward
        names = [name for bucket in part.buckets for name in bucket.layout.names]
        if USAGE in names:
            return
        used = blank(len(names))
        part.under_way.append(self._control.submit(lambda: maximum(used, self.wire.world)))

    def _land(self, part: Part) -> Process:
        """Take in an exchange of weights, unless it may lag and has not ended."""
        if not part.may_stay:
            yield from self._conclude(part)

    def _conclude(self, part: Part) -> Process:
        if not part.under_way:
            return
        yield from self._wait(part.under_way)
        yield from self._finish(part)

    def _finish(self, part: Part) -> Process:
        part.finishing = [self._control.submit(lambda flow=flow: flow) for flow in part.finish()]  # type: ignore[misc]
        if part is self._weights:
            yield from self._wait(part.finishing)
        part.commit()

    def _wait(self, events: list[Event]) -> Process:
        begin = self.clock.now
        yield from events
        self.exposed += self.clock.now - begin

    @property
    def begun(self) -> int | None:
        """Where exchanges may lag: how many were begun, if one was at the end of the last step; None otherwise."""
        weights = self._weights
        return weights.exchanges if weights is not None and weights.has_just_begun else None

    def totals(self) -> Totals:
        """So far."""
        meter, wire = self.wire.meter, self.wire
        return Totals(self.clock.now, self.exposed, meter.bytes, meter.messages, wire.most_bytes, wire.inside_bytes)


def blank(nbytes: int) -> Tensor:
    """So many bytes, without memory."""
    return torch.empty(nbytes, dtype=torch.uint8, device=META)
