"""Training: a training loop in virtual time, which plans, launches and waits as the real one does.

Gradients as in :mod:`gossamer.sync.gradients`, weights as in :mod:`gossamer.sync.weights`: buckets in the plan's
order, bucket ``i`` on lane ``i % lanes``, small agreements on a lane of their own.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.algorithms.base import Algorithm, Context, Subject, left_alone
from gossamer.buckets import Bucket, Plan, make_plan
from gossamer.comm.ops import Flow, Group, all_reduce, broadcast, maximum
from gossamer.errors import ConfigurationError
from gossamer.pieces import cut
from gossamer.simulate.clock import Clock, Event, Process
from gossamer.simulate.clocked import Lane, Wire
from gossamer.simulate.profile import Compute, Link
from gossamer.state import State
from gossamer.sync.checks import named_parameters
from gossamer.sync.launch import launch_order
from gossamer.sync.module_buffers import Buffers, floating, named_buffers, resolve_buffers
from gossamer.sync.usage import USAGE, with_usage

META = torch.device("meta")

_SUBJECTS: tuple[Subject, ...] = ("gradients", "weights")

MakeFlow = Callable[[], Flow[Any]]


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one training step takes, as the mean over steps in steady state.

    ``exposed_seconds``: the training loop stands still for communication, so step = compute + exposed.
    ``wire_seconds``: the payload at the link's full rate, latencies not counted.
    """

    step_seconds: float
    compute_seconds: float
    wire_seconds: float
    exposed_seconds: float
    bytes_per_step: float
    messages_per_step: float

    @property
    def bound_seconds(self) -> float:
        """What perfect overlap would give: the larger of computation and wire."""
        return max(self.compute_seconds, self.wire_seconds)


class Part:
    """The buckets of what moves gradients, or weights; their states, and what is under way."""

    def __init__(
        self, plan: Plan, algorithm: Algorithm, lanes: int, members: tuple[int, ...], nodes: tuple[Group, ...]
    ) -> None:
        self.algorithm = algorithm
        self._lanes = [0] * len(plan.layouts) if algorithm.serial else plan.lanes(lanes)
        self.buckets = [Bucket(index, replace(layout, device=META)) for index, layout in enumerate(plan.layouts)]
        self.under_way: list[Event] = []
        self.finishing: list[Event] = []
        self._handlers = [algorithm.of(bucket.layout.label) for bucket in self.buckets]
        self._states = [State(bucket.flat) for bucket in self.buckets]
        self._step_states = {bucket.layout.label: State(torch.zeros((), device=META)) for bucket in self.buckets}
        self._members, self._nodes = members, nodes

    def launch(self, bucket: Bucket, number: int, lanes: Sequence[Lane]) -> None:
        """Start the flow of one bucket."""
        handler, state, ctx = self._handlers[bucket.index], self._states[bucket.index], self._context(number)
        lane = lanes[self._lanes[bucket.index]]
        due = handler.due(number)
        if self.algorithm.subject == "weights" and not due:
            return
        exchange = handler.exchange if due else left_alone
        self.under_way.append(lane.submit(lambda: exchange(bucket, state, ctx)))

    def finish(self, number: int) -> Iterator[Flow[None]]:
        """What the algorithm does once per step."""
        for label, state in self._step_states.items():
            mine = [bucket for bucket in self.buckets if bucket.layout.label == label]
            handler = self._handlers[mine[0].index]
            if not handler.finishes_at(number):
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
        return Context(number, 0, self._members, self._nodes)


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
        *,
        gradients: Part | None,
        weights: Part | None,
        preludes: Sequence[MakeFlow],
        overlap_forward: bool = False,
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
            yield from self._update_in_parts(self._gradients, number - 1)
            begin = self.clock.now
        else:
            begin = self.clock.now + self._compute.forward
        due = self._gradients is not None and self._gradients.algorithm.due(number)
        if self._gradients is not None and due:
            yield begin  # what finished the step before may take as long as this forward pass
            yield from self._wait(self._gradients.finishing)
            begin = self.clock.now
            yield from self._send_gradients(self._gradients, number, begin)
        yield begin + self._compute.backward
        if self._overlap and due:
            return
        for part in (self._gradients, self._weights):
            if part is not None:
                yield from self._conclude(part, number)
        yield self.clock.now + self._compute.optimizer
        if self._weights is not None and self._weights.algorithm.due(number + 1):
            for bucket in self._weights.buckets:
                self._weights.launch(bucket, number + 1, self._lanes)

    def _update_in_parts(self, part: Part, number: int) -> Process:
        """A forward pass that waits for each bucket of step ``number`` where it is needed first, and updates its parameters."""
        compute, begin = self._compute, self.clock.now
        total = sum(bucket.layout.nbytes for bucket in part.buckets)
        needs = [(compute.needed_at(bucket.layout.names), bucket.index) for bucket in part.buckets]
        for moment, index in sorted(needs):
            yield begin + moment
            yield from self._wait([part.under_way[index]])
            yield self.clock.now + compute.optimizer * part.buckets[index].layout.nbytes / max(1, total)
            begin = self.clock.now - moment
        yield begin + compute.forward
        yield from self._finish(part, number)

    def _send_gradients(self, part: Part, number: int, begin: float) -> Process:
        """Buckets leave during backward; its end waits for them and for the agreement on which parameters were used."""
        for bucket in part.buckets:
            yield begin + self._compute.ready_at(bucket.layout.names)
            part.launch(bucket, number, self._lanes)
        yield begin + self._compute.backward
        names = [name for bucket in part.buckets for name in bucket.layout.names]
        if USAGE in names:
            return
        used = _blank(len(names))
        part.under_way.append(self._control.submit(lambda: maximum(used, self.wire.world)))

    def _conclude(self, part: Part, number: int) -> Process:
        if not part.under_way:
            return
        yield from self._wait(part.under_way)
        yield from self._finish(part, number)

    def _finish(self, part: Part, number: int) -> Process:
        part.finishing = [self._control.submit(lambda flow=flow: flow) for flow in part.finish(number)]  # type: ignore[misc]
        if part is self._weights:
            yield from self._wait(part.finishing)
        part.commit()

    def _wait(self, events: list[Event]) -> Process:
        begin = self.clock.now
        yield from events
        self.exposed += self.clock.now - begin

    def totals(self) -> tuple[float, float, int, int]:
        """So far: time, exposed time, bytes, messages."""
        return self.clock.now, self.exposed, self.wire.meter.bytes, self.wire.meter.messages


def step_time(
    model_or_plan: nn.Module | Plan,
    algorithm: Algorithm,
    *,
    world: int,
    link: Link,
    compute: Compute,
    lanes: int = 2,
    buffers: Buffers | None = None,
    steps: int = 8,
    warmup: int = 2,
    ranks_per_node: int = 1,
    inside: Link | None = None,
    overlap_forward: bool = False,
) -> StepTime:
    """The time of one training step of ``algorithm`` among ``world`` ranks, each on a ``link`` of its own.

    Args:
        model_or_plan: the model (its tensors may be on the ``meta`` device), or a plan of buckets.
        algorithm: any algorithm; its own ``exchange`` and ``finish`` are executed.
        world: number of ranks.
        link: bandwidth and latency of each rank, or of each machine where several ranks share one.
        compute: what one step computes, and when each gradient is there.
        lanes: flows that may be under way at the same time.
        buffers: as in :func:`gossamer.replicate`; for models that have buffers.
        steps: steps to average over, after ``warmup`` others. An algorithm with a cycle needs a multiple of it.
        ranks_per_node: how many ranks share a machine.
        inside: how those reach each other; at once by default.
        overlap_forward: as in :func:`gossamer.replicate`.
    """
    _check(world=world, lanes=lanes, steps=steps, warmup=warmup + 1, ranks_per_node=ranks_per_node)
    mode = resolve_buffers(buffers, algorithm.subject)
    parts = {subject: algorithm.part(subject) for subject in _SUBJECTS}
    plans = {
        subject: model_or_plan if isinstance(model_or_plan, Plan) else _plan(model_or_plan, part, compute, mode)
        for subject, part in parts.items()
        if part is not None
    }
    if overlap_forward:
        if parts["gradients"] is None or parts["weights"] is not None:
            raise ConfigurationError(
                f"overlap_forward: {algorithm!r} moves weights, which travel beside forward and backward anyway"
            )
        joined = step_time(
            model_or_plan, algorithm, world=world, link=link, compute=compute, lanes=lanes, buffers=buffers,
            steps=steps, warmup=warmup, ranks_per_node=ranks_per_node, inside=inside,
        )  # fmt: skip
        plans["gradients"] = _arranged(plans["gradients"], compute, joined.wire_seconds)
    communicated = {name for plan in plans.values() for name in plan.names}
    unknown = sorted(set(compute.ready) - communicated)
    if unknown:
        raise ConfigurationError(f"compute.ready names parameters that are not communicated: {', '.join(unknown[:3])}")
    members = tuple(range(world))
    nodes = tuple(members[first : first + ranks_per_node] for first in range(0, world, ranks_per_node))
    clock = Clock()
    made = {subject: Part(plan, parts[subject], lanes, members, nodes) for subject, plan in plans.items()}  # type: ignore[arg-type]
    preludes = [] if isinstance(model_or_plan, Plan) or world == 1 else _preludes(model_or_plan, algorithm, mode)
    wire = Wire(clock, link, world, nodes, inside)
    training = Training(
        clock,
        wire,
        compute,
        lanes,
        gradients=made.get("gradients"),
        weights=made.get("weights"),
        preludes=preludes,
        overlap_forward=overlap_forward,
    )
    seconds, exposed, sent, messages = _run(training, steps, warmup)
    return StepTime(
        step_seconds=seconds,
        compute_seconds=compute.seconds,
        wire_seconds=8 * sent / link.bandwidth,
        exposed_seconds=exposed,
        bytes_per_step=sent,
        messages_per_step=messages,
    )


def _check(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 1:
            raise ConfigurationError(f"{name} is out of range: {value - (name == 'warmup')}")


def _run(training: Training, steps: int, warmup: int) -> list[float]:
    """What ``training.totals()`` grow by per step, after ``warmup`` steps."""
    marks: list[tuple[float, float, int, int]] = []

    def loop() -> Process:
        for number in range(warmup + steps):
            if number == warmup:
                marks.append(training.totals())
            yield from training.step(number)
        marks.append(training.totals())

    with torch.no_grad():
        training.clock.spawn(loop())
        training.clock.run()
    return [(end - begin) / steps for begin, end in zip(*marks, strict=True)]


def _plan(model: nn.Module, algorithm: Algorithm, compute: Compute, mode: Buffers) -> Plan:
    """The plan that a replica of ``model`` has once it has learned the order of gradients."""
    tensors: dict[str, Tensor] = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    if algorithm.subject == "weights":
        if mode == "average":
            tensors |= {f"{name} (buffer)": b for name, b in floating(named_buffers(model)).items()}
        return make_plan(cut(tensors, algorithm.weight_parts), algorithm, at_once=True)
    in_order = list(reversed(tensors))
    in_order.sort(key=lambda name: compute.ready_at([name]))
    return make_plan(with_usage({name: tensors[name] for name in in_order}, algorithm), algorithm)


def _arranged(plan: Plan, compute: Compute, wire_seconds: float) -> Plan:
    """The plan with the buckets in the order in which a replica launches them when they overlap the forward pass."""
    total = max(1, sum(layout.nbytes for layout in plan.layouts))
    order = launch_order(
        [compute.ready_at(layout.names) for layout in plan.layouts],
        [wire_seconds * layout.nbytes / total for layout in plan.layouts],
        [compute.needed_at(layout.names) for layout in plan.layouts],
    )
    return Plan(tuple(plan.layouts[index] for index in order))


def _preludes(model: nn.Module, algorithm: Algorithm, mode: Buffers) -> list[MakeFlow]:
    """What a replica sends of the module's buffers before each forward pass: one operation per dtype."""
    tensors = named_buffers(model) if mode == "broadcast" else floating(named_buffers(model))
    if mode == "local" or (mode == "average" and algorithm.subject == "weights"):
        return []
    sizes: dict[torch.dtype, int] = {}
    for tensor in tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.numel() * tensor.element_size()
    operation: Callable[[Tensor], Flow[Tensor]] = broadcast if mode == "broadcast" else all_reduce
    return [partial(lambda size: operation(_blank(size)), size) for size in sizes.values()]


def _blank(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=META)
