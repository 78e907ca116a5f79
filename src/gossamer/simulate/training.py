"""Training: a training loop in virtual time, which plans, launches and waits as the real one does.

Gradients as in :mod:`gossamer.sync.gradients`, weights as in :mod:`gossamer.sync.weights`: buckets in the plan's
order, bucket ``i`` on lane ``i % lanes``, small agreements on a lane of their own.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket, Plan, make_plan
from gossamer.comm.ops import Flow, all_reduce, broadcast
from gossamer.errors import ConfigurationError
from gossamer.simulate.clock import Clock, Event, Process
from gossamer.simulate.clocked import Lane, Wire
from gossamer.simulate.profile import Compute, Link
from gossamer.state import State
from gossamer.sync.checks import named_parameters
from gossamer.sync.module_buffers import Buffers, floating, named_buffers, resolve_buffers

META = torch.device("meta")

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


class Training:
    """One rank's loop: its buckets, their state, its lanes, and the waits between them.

    ``preludes`` are flows that run, one after the other, before each forward pass.
    """

    def __init__(
        self,
        plan: Plan,
        algorithm: Algorithm,
        world: int,
        link: Link,
        compute: Compute,
        lanes: int,
        preludes: Sequence[MakeFlow],
    ) -> None:
        self.clock = Clock()
        self.wire = Wire(self.clock, link, world)
        self.exposed = 0.0
        self._algorithm, self._compute, self._preludes = algorithm, compute, preludes
        self._members = tuple(range(world))
        self._buckets = [Bucket(index, replace(layout, device=META)) for index, layout in enumerate(plan.layouts)]
        self._states = [State(bucket.flat) for bucket in self._buckets]
        self._step_state = State(torch.zeros((), device=META))
        self._lanes = [Lane(self.clock, self.wire) for _ in range(lanes)]
        self._control = Lane(self.clock, self.wire)
        self._under_way: list[Event] = []

    def step(self, number: int) -> Process:
        """One step, from the beginning of its forward pass to the end of the optimizer's work."""
        for make_flow in self._preludes:
            yield from self._wait([self._control.submit(make_flow)])
        yield from self._weights(number) if self._algorithm.subject == "weights" else self._gradients(number)

    def _gradients(self, number: int) -> Process:
        """Buckets leave during backward; its end waits for them and for the agreement on which parameters were used."""
        begin = self.clock.now + self._compute.forward
        for bucket in self._buckets:
            yield begin + self._compute.ready_at(bucket.layout.names)
            self._launch(bucket, number)
        yield begin + self._compute.backward
        used = _blank(sum(len(bucket.segments) for bucket in self._buckets))
        self._under_way.append(self._control.submit(lambda: all_reduce(used, "max")))
        yield from self._conclude(number)
        yield self.clock.now + self._compute.optimizer

    def _weights(self, number: int) -> Process:
        """Weights leave after the optimizer's step; what they bring is awaited before its next one."""
        yield self.clock.now + self._compute.forward + self._compute.backward
        yield from self._conclude(number)
        yield self.clock.now + self._compute.optimizer
        for bucket in self._buckets:
            self._launch(bucket, number + 1)

    def _launch(self, bucket: Bucket, number: int) -> None:
        lane, state, ctx = self._lanes[bucket.index % len(self._lanes)], self._states[bucket.index], self._context(number)
        self._under_way.append(lane.submit(lambda: self._algorithm.exchange(bucket, state, ctx)))

    def _conclude(self, number: int) -> Process:
        if not self._under_way:
            return
        yield from self._wait(self._under_way)
        self._under_way = []
        flow = self._algorithm.finish(self._buckets, self._step_state, self._context(number))
        if flow is not None:
            yield from self._wait([self._control.submit(lambda: flow)])
        for state in (*self._states, self._step_state):
            state.commit()

    def _wait(self, events: list[Event]) -> Process:
        begin = self.clock.now
        yield from events
        self.exposed += self.clock.now - begin

    def _context(self, number: int) -> Context:
        return Context(number, 0, self._members)

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
) -> StepTime:
    """The time of one training step of ``algorithm`` among ``world`` ranks, each on a ``link`` of its own.

    Args:
        model_or_plan: the model (its tensors may be on the ``meta`` device), or a plan of buckets.
        algorithm: any algorithm; its own ``exchange`` and ``finish`` are executed.
        world: number of ranks.
        link: bandwidth and latency of each rank.
        compute: what one step computes, and when each gradient is there.
        lanes: flows that may be under way at the same time.
        buffers: as in :func:`gossamer.replicate`; for models that have buffers.
        steps: steps to average over, after ``warmup`` others. An algorithm with a cycle needs a multiple of it.
    """
    for name, value in {"world": world, "lanes": lanes, "steps": steps, "warmup": warmup + 1}.items():
        if value < 1:
            raise ConfigurationError(f"{name} is out of range: {value - (name == 'warmup')}")
    if isinstance(model_or_plan, Plan):
        plan, preludes = model_or_plan, []
    else:
        mode = resolve_buffers(buffers, algorithm.subject)
        plan, preludes = _plan(model_or_plan, algorithm, compute, mode), _preludes(model_or_plan, algorithm, mode)
    unknown = sorted(set(compute.ready) - set(plan.names))
    if unknown:
        raise ConfigurationError(f"compute.ready names parameters that are not communicated: {', '.join(unknown[:3])}")
    training = Training(plan, algorithm, world, link, compute, lanes, preludes if world > 1 else [])
    seconds, exposed, sent, messages = _run(training, steps, warmup)
    return StepTime(
        step_seconds=seconds,
        compute_seconds=compute.seconds,
        wire_seconds=8 * sent / link.bandwidth,
        exposed_seconds=exposed,
        bytes_per_step=sent,
        messages_per_step=messages,
    )


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
        return make_plan(tensors, algorithm.bucket_bytes)
    in_order = list(reversed(tensors))
    in_order.sort(key=lambda name: compute.ready_at([name]))
    return make_plan({name: tensors[name] for name in in_order}, algorithm.bucket_bytes)


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
