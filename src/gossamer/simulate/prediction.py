"""Prediction: the time of a training step, from what is computed and a description of the network."""

from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import SGD

from gossamer.algorithms.base import Algorithm, Subject
from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.buckets import Plan
from gossamer.errors import ConfigurationError
from gossamer.simulate.checks import check_history, check_kind, check_links, check_names, check_whole
from gossamer.simulate.clock import Clock
from gossamer.simulate.clocked import Wire
from gossamer.simulate.plans import arranged, plans_for
from gossamer.simulate.profile import Compute, Link
from gossamer.simulate.training import Part, Totals, Training
from gossamer.simulate.window import Window, per_step
from gossamer.sync.attach import attach
from gossamer.sync.module_buffers import Buffers, resolve_buffers

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
    ranks_per_node: int | None = None,
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
        algorithm: any algorithm; its own ``exchange`` (or ``swap``) and ``finish`` are executed.
        world: number of ranks.
        link: bandwidth and latency of each rank, or of each machine where several ranks share one.
        compute: what one step computes, and when each gradient is there.
        lanes: flows that may be under way at the same time.
        buffers: as in :func:`gossamer.replicate`; for models that have buffers.
        steps: steps to average over, rounded up to whole cycles of the algorithm, after which what travels repeats itself
            (``Cadence.cycle``; where that is more than 512 steps, to whole ``Cadence.period``). Where
            exchanges may lag, from the beginning of one to that of another.
        warmup: steps before these; as many more as let everything be exchanged once: first exchanges may be longer.
        ranks_per_node: how many ranks share a machine, and its link: consecutive ones. By default as many as the algorithm
            says (``Hierarchical(ranks_per_node=)``), else 1.
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
    check_kind("algorithm", algorithm, Algorithm, "Gossip()")
    check_kind("compute", compute, Compute, "Compute(forward=0.03, backward=0.06)")
    ranks_per_node = (algorithm.traits.ranks_per_node or 1) if ranks_per_node is None else ranks_per_node
    check_whole(1, world=world, lanes=lanes, steps=steps, ranks_per_node=ranks_per_node)
    check_whole(0, warmup=warmup)
    check_links(link, inside, ranks_per_node)
    check_history(history, algorithm, model_or_plan)
    nodes = consecutive(world, ranks_per_node)
    algorithm.check(world)
    algorithm.check(world, nodes)
    mode = resolve_buffers(buffers, algorithm.subject)
    if algorithm.traits.takes_momentum:  # which a replica would have: how vectors travel depends on it
        algorithm = attach(algorithm, [SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9)])
    parts = {subject: part for subject in _SUBJECTS if (part := algorithm.part(subject)) is not None}
    if overlap_forward and list(parts) != ["gradients"]:
        raise ConfigurationError(
            f"overlap_forward: {algorithm!r} moves weights, which travel beside forward and backward anyway"
        )
    plans, preludes = plans_for(model_or_plan, algorithm, parts, compute, mode, history or 0, world)
    check_names(plans.values(), compute)
    window = Window.of(algorithm, world, len(nodes), warmup, steps)

    def run(overlap: bool) -> Totals:
        clock, members = Clock(), tuple(range(world))
        made = {subject: Part(plans[subject], part, lanes, members, nodes, overlap_forward) for subject, part in parts.items()}
        wire = Wire(clock, link, world, nodes if ranks_per_node > 1 else (), inside)
        of_gradients, of_weights = made.get("gradients"), made.get("weights")
        return per_step(Training(clock, wire, compute, lanes, of_gradients, of_weights, preludes, overlap), window)

    if overlap_forward:
        apart = run(False)
        line = max(8 * apart.busiest / link.bandwidth, 8 * apart.inside / (inside or Link()).bandwidth)
        plans["gradients"] = arranged(plans["gradients"], compute, line)
    found = run(overlap_forward)
    return StepTime(
        step_seconds=found.seconds,
        compute_seconds=compute.seconds,
        wire_seconds=8 * found.busiest / link.bandwidth,
        exposed_seconds=found.exposed,
        bytes_per_step=found.sent,
        messages_per_step=found.messages,
    )
