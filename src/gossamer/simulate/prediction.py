"""Prediction: the time of a training step, from what is computed and a description of the network."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import SGD, Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.buckets import buffer_name
from gossamer.engine.module_buffers import Buffers, averaged, floating, named_buffers, resolve_buffers
from gossamer.replicate import replicate_over
from gossamer.simulate.checks import check_kind, check_links, check_names, check_whole
from gossamer.simulate.clock import Clock
from gossamer.simulate.clocked import ClockedRunner, Wire
from gossamer.simulate.profile import Compute, Link
from gossamer.simulate.stand_in import leave_to_torch, stand_in, take_time
from gossamer.simulate.valueless import Valueless
from gossamer.simulate.window import Window, per_step

MakeOptimizer = Callable[..., Optimizer]
"""Called with the parameters: ``torch.optim.AdamW``, or ``partial(torch.optim.SGD, lr=0.1, momentum=0.9)``."""


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one training step takes, as the mean over steps in steady state.

    ``exposed_seconds``: the training loop stands still for communication, so step = compute + exposed.
    ``wire_seconds``: what leaves, or reaches, the busiest machine at the link's goodput, latencies not counted.
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
    model: nn.Module,
    algorithm: Algorithm | None,
    *,
    world: int,
    link: Link,
    compute: Compute,
    optimizer: MakeOptimizer | None = None,
    lanes: int = 2,
    buffers: Buffers | None = None,
    steps: int = 8,
    warmup: int = 2,
    ranks_per_node: int | None = None,
    inside: Link | None = None,
    overlap_forward: bool = False,
) -> StepTime:
    """The time of one training step of ``algorithm`` among ``world`` ranks, each on a ``link`` of its own.

    A replica of the model is trained in virtual time, by the code that trains real ones, on tensors without values: what
    :func:`gossamer.replicate` accepts is priced, and what it refuses is refused.

    All ranks are equally fast. Exchanges that may lag (``lag=``) therefore lag only where the wire takes longer than a step.
    Of algorithms that follow each other (``after``) the last one is priced, from the step on at which its time begins; the
    steps before it are run, too. What one does differently at its own beginning (``ChunkSparse(warmup=)``) is priced as it is
    there: leave it out to price what comes later.

    Args:
        model: the model; its tensors may be on the ``meta`` device, and stay as they are.
        algorithm: any algorithm; None for an optimizer that communicates by itself.
        world: number of ranks.
        link: bandwidth and latency of each rank, or of each machine where several ranks share one.
        compute: what one step computes, and when each gradient is there.
        optimizer: makes the optimizer of the parameters that it is called with. It matters where what it remembers travels
            (``GossipGraD``), or it communicates (``OneBitAdam``). By default SGD, with momentum if the algorithm takes that.
        lanes: flows that may be under way at the same time.
        buffers: as in :func:`gossamer.replicate`; for models that have buffers.
        steps: steps to average over, rounded up to whole cycles of the algorithm, after which what travels repeats itself
            (``Cadence.cycle``; where that is more than 512 steps, to whole ``Cadence.period``). Where
            exchanges may lag, from the beginning of one to that of another.
        warmup: steps before these; as many more as let everything be exchanged once: first exchanges may be longer.
        ranks_per_node: how many ranks share a machine, and its link: consecutive ones. By default as many as the algorithm
            says (``Hierarchical(ranks_per_node=)``), else 1.
        inside: the link between ranks of one machine, where several share one; without delay by default.
        overlap_forward: as in :func:`gossamer.replicate`.

    Raises:
        ConfigurationError: a number out of range or of another type, an algorithm that cannot run among so many ranks, a
            moment of a parameter that is not communicated, an ``inside`` where no two ranks share a machine, or whatever
            :func:`gossamer.replicate` refuses.
    """
    make_optimizer = _check(model, algorithm, link, compute, optimizer)
    if ranks_per_node is None:
        ranks_per_node = (algorithm.traits.ranks_per_node if algorithm is not None else None) or 1
    check_whole(1, world=world, lanes=lanes, steps=steps, ranks_per_node=ranks_per_node)
    check_whole(0, warmup=warmup)
    check_links(link, inside, ranks_per_node)
    nodes = consecutive(world, ranks_per_node)
    clock = Clock()
    wire = Wire(clock, link, world, nodes if ranks_per_node > 1 else (), inside)
    runner = ClockedRunner(clock, wire, lanes, nodes)
    twin = stand_in(model, compute, runner.compute, _left_out(model, algorithm, buffers))
    stepping = make_optimizer([parameter for parameter in twin.parameters() if parameter.requires_grad])
    leave_to_torch(stepping)
    take_time(stepping, compute.optimizer, runner.compute)
    replica = replicate_over(runner, twin, stepping, algorithm, buffers=buffers, overlap_forward=overlap_forward)

    def step() -> None:
        stepping.zero_grad()
        twin().backward()
        stepping.step()

    window = Window.of(replica.algorithm, world, len(nodes), warmup, steps, overlap_forward)
    with Valueless():  # type: ignore[no-untyped-call]
        found = per_step(step, runner, wire, window)
    return StepTime(
        step_seconds=found.seconds,
        compute_seconds=compute.seconds,
        wire_seconds=8 * found.busiest / link.goodput,
        exposed_seconds=found.exposed,
        bytes_per_step=found.sent,
        messages_per_step=found.messages,
    )


def _check(
    model: nn.Module, algorithm: Algorithm | None, link: Link, compute: Compute, optimizer: MakeOptimizer | None
) -> MakeOptimizer:
    """Refuse what is of another type. Returns what makes the optimizer."""
    check_kind("model", model, nn.Module, "torch.nn.Linear(4, 4, device='meta')")
    if algorithm is not None:
        check_kind("algorithm", algorithm, Algorithm, "Gossip()")
    check_kind("link", link, Link, "Link(bandwidth=200e6, latency=1e-3)")
    check_kind("compute", compute, Compute, "Compute(forward=0.03, backward=0.06)")
    check_names(model, compute)
    if optimizer is not None:
        return optimizer
    takes_momentum = algorithm is not None and algorithm.traits.takes_momentum
    return partial(SGD, lr=0.1, momentum=0.9 if takes_momentum else 0.0)


def _left_out(model: nn.Module, algorithm: Algorithm | None, buffers: Buffers | None) -> set[str]:
    """The buffers that do not travel with the weights because of their values, which a twin does not have."""
    if algorithm is None or algorithm.part("weights") is None or resolve_buffers(buffers, algorithm.subject) != "average":
        return set()
    travelling = averaged(model)
    return {name for name in floating(named_buffers(model)) if buffer_name(name) not in travelling}
