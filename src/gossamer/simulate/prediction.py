"""Prediction: the time of a training step, from what is computed and a description of the network."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import SGD

from gossamer.algorithms.base import Algorithm, Subject
from gossamer.algorithms.hierarchical import consecutive
from gossamer.buckets import Plan, make_plan
from gossamer.checks import hint_at_class, is_whole
from gossamer.comm.ops import Flow, all_reduce, broadcast
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.pieces import cut, part_of
from gossamer.simulate.clock import Clock, Process
from gossamer.simulate.clocked import Wire
from gossamer.simulate.profile import Compute, Link
from gossamer.simulate.training import MakeFlow, Part, Training, blank
from gossamer.sync.agreement import PORTION
from gossamer.sync.checks import named_parameters
from gossamer.sync.history import weight_of
from gossamer.sync.launch import launch_order
from gossamer.sync.module_buffers import Buffers, averaged, check_buffers, floating, named_buffers, resolve_buffers
from gossamer.sync.usage import USAGE, with_usage

_SUBJECTS: tuple[Subject, ...] = ("gradients", "weights")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one training step takes, as the mean over steps in steady state.

    ``exposed_seconds``: the training loop stands still for communication, so step = compute + exposed.
    ``wire_seconds``: what leaves, or reaches, the busiest machine at the link's full rate, latencies not counted.
    ``bytes_per_step``, ``messages_per_step``: what rank 0 sends, as its ``replica.metrics()`` would count it.
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
    history: int | None = None,
) -> StepTime:
    """The time of one training step of ``algorithm`` among ``world`` ranks, each on a ``link`` of its own.

    All ranks are equally fast. Exchanges that may lag (``lag=``) therefore lag only where the wire takes longer than a step.
    Of algorithms that follow each other (``after``) the last one is priced, from the step on at which its time begins. What
    one does differently at its own beginning (``ChunkSparse(warmup=)``) is priced as it is there: leave it out to price what
    comes later.

    Args:
        model_or_plan: the model (its tensors may be on the ``meta`` device), or a plan of buckets.
        algorithm: any algorithm; its own ``exchange`` and ``finish`` are executed.
        world: number of ranks.
        link: bandwidth and latency of each rank, or of each machine where several ranks share one.
        compute: what one step computes, and when each gradient is there.
        lanes: flows that may be under way at the same time.
        buffers: as in :func:`gossamer.replicate`; for models that have buffers.
        steps: steps to average over, rounded up to whole cycles of the algorithm, after which what travels repeats itself
            (``Algorithm.traffic_cycle``; where that is more than 512 steps, to whole ``Algorithm.traffic_period``). Where
            exchanges may lag, from the beginning of one to that of another.
        warmup: steps before these; as many more as let everything be exchanged once: first exchanges may be longer.
        ranks_per_node: how many ranks share a machine, and its link: consecutive ones.
        inside: how those reach each other, where there are several; at once by default.
        overlap_forward: as in :func:`gossamer.replicate`.
        history: how many tensors the optimizer remembers of each weight: 0 for plain SGD, 1 with momentum, 2 for Adam. They
            travel with the weights where the algorithm exchanges them (``GossipGraD``), and must be told there, unless a
            plan holds them already.

    Raises:
        ConfigurationError: a number out of range or of another type, an algorithm that cannot run among so many ranks, a
            moment of a parameter that is not communicated, a plan that was made for another algorithm, an
            ``overlap_forward`` of what moves weights, an ``inside`` where no two ranks share a machine, or no ``history``
            where it is exchanged.
    """
    _check_kind("algorithm", algorithm, Algorithm, "Gossip()")
    _check_kind("compute", compute, Compute, "Compute(forward=0.03, backward=0.06)")
    _check_whole(1, world=world, lanes=lanes, steps=steps, ranks_per_node=ranks_per_node)
    _check_whole(0, warmup=warmup)
    _check_links(link, inside, ranks_per_node)
    _check_history(history, algorithm, model_or_plan)
    nodes = consecutive(world, ranks_per_node)
    algorithm.check(world)
    algorithm.check_machines(nodes)
    mode = resolve_buffers(buffers, algorithm.subject)
    if algorithm.takes_momentum:  # which a replica would have: how vectors travel depends on it
        algorithm = algorithm.attach([SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)])
    parts = {subject: part for subject in _SUBJECTS if (part := algorithm.part(subject)) is not None}
    if overlap_forward and list(parts) != ["gradients"]:
        raise ConfigurationError(
            f"overlap_forward: {algorithm!r} moves weights, which travel beside forward and backward anyway"
        )
    preludes: list[MakeFlow] = []
    if isinstance(model_or_plan, Plan):
        plans = dict.fromkeys(parts, model_or_plan)
        for part in parts.values():
            _check_plan(model_or_plan, part)
    else:
        _check_kind("model_or_plan", model_or_plan, nn.Module, "a torch.nn.Module, or make_plan(tensors, algorithm)")
        check_buffers(algorithm, model_or_plan, mode)
        plans = {subject: _plan(model_or_plan, part, compute, mode, history or 0) for subject, part in parts.items()}
        if world > 1:
            preludes = _preludes(model_or_plan, algorithm, mode)
    _check_names(plans.values(), compute)
    members, first = tuple(range(world)), max(algorithm.changes, default=0)
    cycle = algorithm.traffic_cycle(world, len(nodes))
    cycle = cycle if cycle <= _LONGEST_CYCLE else algorithm.traffic_period
    warmup += algorithm.traffic_period * (1 + algorithm.may_lag) - 1
    steps = -(-steps // cycle) * cycle
    exchanges = cycle // algorithm.step_of(1) if algorithm.may_lag else None

    def run(overlap: bool) -> list[float]:
        clock = Clock()
        made = {subject: Part(plans[subject], part, lanes, members, nodes, overlap_forward) for subject, part in parts.items()}
        wire = Wire(clock, link, world, nodes if ranks_per_node > 1 else (), inside)
        of_gradients, of_weights = made.get("gradients"), made.get("weights")
        training = Training(clock, wire, compute, lanes, of_gradients, of_weights, preludes, overlap)
        return _per_step(training, first, warmup, steps, exchanges)

    if overlap_forward:
        *_, busiest, within = run(False)
        line = max(8 * busiest / link.bandwidth, 8 * within / (inside or Link()).bandwidth)
        plans["gradients"] = _arranged(plans["gradients"], compute, line)
    seconds, exposed, sent, messages, busiest, _ = run(overlap_forward)
    return StepTime(
        step_seconds=seconds,
        compute_seconds=compute.seconds,
        wire_seconds=8 * busiest / link.bandwidth,
        exposed_seconds=exposed,
        bytes_per_step=sent,
        messages_per_step=messages,
    )


def _check_kind(name: str, value: object, kind: type, example: str) -> None:
    if not isinstance(value, kind):
        hint = hint_at_class(value) or f": write for example {example}"
        raise ConfigurationError(f"{name} must be an instance of {kind.__name__}; got {value!r}{hint}")


def _check_whole(least: int, **numbers: object) -> None:
    for name, value in numbers.items():
        if not is_whole(value, least):
            raise ConfigurationError(f"{name} must be a whole number, at least {least}; got {value!r}")


def _check_links(link: object, inside: object, ranks_per_node: int) -> None:
    _check_kind("link", link, Link, "Link(bandwidth=200e6, latency=1e-3)")
    if inside is None:
        return
    _check_kind("inside", inside, Link, "Link(bandwidth=100e9)")
    if ranks_per_node == 1:
        raise ConfigurationError(
            "inside= says how the ranks of one machine reach each other, and with ranks_per_node=1 no two share one: say how "
            "many do, or leave it out"
        )


def _check_plan(plan: Plan, algorithm: Algorithm) -> None:
    """Refuse a plan that was made for another algorithm: its buckets would be handled as no replica does."""
    uncut = algorithm.weight_parts > 1 and any(part_of(name)[1] is None for name in plan.names)
    for layout in plan.layouts:
        segments = [segment for segment in layout.segments if segment.name != USAGE]
        blanks = {s.name: torch.empty_strided(s.shape, s.stride, dtype=layout.dtype, device="meta") for s in segments}
        if uncut or any(algorithm.route(name, blank) != layout.label for name, blank in blanks.items()):
            raise ConfigurationError(
                f"the plan was not made for {algorithm!r}, which would put {layout.names[0]!r} elsewhere: give the model, or "
                "make_plan(tensors, algorithm)" + (" of tensors that were cut() into its parts" if uncut else "")
            )


def _check_names(plans: Iterable[Plan], compute: Compute) -> None:
    communicated = {part_of(name)[0] for plan in plans for name in plan.names}
    for what, moments in (("ready", compute.ready), ("needed", compute.needed)):
        unknown = sorted(set(moments) - communicated)
        if unknown:
            raise ConfigurationError(f"compute.{what} names parameters that are not communicated: {', '.join(unknown[:3])}")


def _check_history(history: int | None, algorithm: Algorithm, model_or_plan: nn.Module | Plan) -> None:
    if history is not None and not is_whole(history, 0):
        raise ConfigurationError(f"history must be a number of tensors per weight; got {history!r}")
    if history is None and algorithm.exchanges_history and not isinstance(model_or_plan, Plan):
        raise ConfigurationError(
            f"{algorithm!r} exchanges what the optimizer remembers of each weight: say how many tensors that is, "
            "history=1 for SGD with momentum, 2 for Adam, 0 for plain SGD"
        )


def _per_step(training: Training, first: int, warmup: int, steps: int, exchanges: int | None) -> list[float]:
    """What ``training.totals()`` grow by per step, over ``steps`` of them, after ``warmup`` others from ``first`` on.

    ``exchanges``: where they may lag, after how many they repeat themselves. Then over so many more steps that both ends are
    where one has just begun: two that lie in other places between two steps would not count alike.
    """
    marks: list[tuple[int, int, tuple[float, ...]]] = []

    def is_a_mark(number: int) -> bool:
        if number < (marks[0][0] + steps if marks else first + warmup):
            return False
        if exchanges is None:
            return True
        return training.begun is not None and (not marks or (training.begun - marks[0][1]) % exchanges == 0)

    def loop() -> Process:
        number = first
        while True:
            if is_a_mark(number):
                marks.append((number, training.begun or 0, training.totals()))
                if len(marks) == 2:
                    return
            yield from training.step(number)
            number += 1

    with torch.no_grad():
        training.clock.spawn(loop())
        training.clock.run()
    (begin, _, before), (end, _, after) = marks
    return [(there - here) / (end - begin) for here, there in zip(before, after, strict=True)]


_LONGEST_CYCLE = 512
"""Steps of a whole cycle of partners that are worth a run through all of them."""


def _plan(model: nn.Module, algorithm: Algorithm, compute: Compute, mode: Buffers, history: int) -> Plan:
    """The plan that a replica of ``model`` has once it has learned the order of gradients, and the optimizer its history."""
    trainable = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    tensors: dict[str, Tensor] = dict(trainable)
    if algorithm.subject == "weights":
        if mode == "average":
            tensors |= averaged(model)
        told = [name for name, p in trainable.items() if algorithm.of(algorithm.route(name, p)).exchanges_history]
        tensors |= {f"{kind} of {name}": trainable[name] for name in told for kind in range(history)}
        return make_plan(cut(tensors, algorithm.weight_parts, weight_of), algorithm, at_once=True)
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
    """What a replica sends of the module's buffers before each forward pass: one operation for each message."""
    if mode == "local" or (mode == "average" and algorithm.subject == "weights"):
        return []
    operation: Callable[[Tensor], Flow[Tensor]] = broadcast if mode == "broadcast" else all_reduce
    sizes = _broadcast_sizes(model) if mode == "broadcast" else _average_sizes(model)
    return [partial(lambda size: operation(blank(size)), size) for size in sizes]


def _broadcast_sizes(model: nn.Module) -> list[int]:
    """Bytes of the messages of ``same_from_rank``: everything that lies on one device, in portions."""
    totals: Counter[torch.device] = Counter()
    for tensor in named_buffers(model).values():
        totals[tensor.device] += tensor.nbytes
    return _in_portions(totals.values())


def _average_sizes(model: nn.Module) -> list[int]:
    """Bytes of the messages of ``module_buffers.average``: of each type on a device, in full precision at least."""
    totals: Counter[tuple[torch.device, torch.dtype]] = Counter()
    for tensor in floating(named_buffers(model)).values():
        totals[tensor.device, tensor.dtype] += wide(tensor.to("meta")).nbytes
    return _in_portions(totals.values())


def _in_portions(totals: Iterable[int]) -> list[int]:
    return [min(PORTION, total - begin) for total in totals for begin in range(0, total, PORTION)]
