"""Prediction: the time of a training step, from what is computed and a description of the network."""

from dataclasses import dataclass
from functools import partial

from torch import nn
from torch.optim import SGD

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.bucket_plan import buffer_name
from gossamer.comm.ops import Group
from gossamer.engine.module_buffers import Buffers, averaged, floating, named_buffers, resolve_buffers
from gossamer.simulate.checks import check_kind, check_left_out, check_links, check_names, check_whole
from gossamer.simulate.cluster import Cluster, Machines
from gossamer.simulate.levels import Levels
from gossamer.simulate.profile import Compute, Link
from gossamer.simulate.run import MakeOptimizer, Training, run
from gossamer.simulate.unequal import waiting_seconds


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """What one training step takes, as the mean over steps in steady state.

    ``exposed_seconds``: the training loop stands still for communication, or does work of it, so step = compute + exposed.
    ``wire_seconds``: what leaves, or reaches, the busiest machine at the link's goodput, latencies not counted.
    ``processor_seconds``: what codecs, copies and the transport's own work of a worker take on a core.
    ``straggler_seconds``: by how much the step is longer than one in which all workers compute for as long; a part of
    ``exposed_seconds``.
    ``bytes_per_step``, ``messages_per_step``: what rank 0 sends, as its ``replica.metrics()`` would count it.
    """

    step_seconds: float
    compute_seconds: float
    wire_seconds: float
    exposed_seconds: float
    bytes_per_step: float
    messages_per_step: float
    processor_seconds: float = 0.0
    straggler_seconds: float = 0.0

    @property
    def bound_seconds(self) -> float:
        """What perfect overlap would give: the larger of computation and wire."""
        return max(self.compute_seconds, self.wire_seconds)


def step_time(
    model: nn.Module,
    algorithm: Algorithm | None,
    *,
    compute: Compute,
    world: int | None = None,
    link: Link | None = None,
    cluster: Cluster | None = None,
    optimizer: MakeOptimizer | None = None,
    lanes: int = 2,
    buffers: Buffers | None = None,
    steps: int | None = None,
    warmup: int = 2,
    ranks_per_node: int | None = None,
    inside: Link | None = None,
    overlap_forward: bool = False,
) -> StepTime:
    """The time of one training step of ``algorithm``, among ``world`` ranks that each have a ``link``, or on a ``cluster``.

    A replica of the model is trained in virtual time, by the code that trains real ones, on tensors without values: what
    :func:`gossamer.replicate` accepts is priced, and what it refuses is refused.

    One rank is trained, and the others take as long. Where the workers of a cluster differ (``stragglers``, ``own`` links),
    what it did is carried out again by all of them, each with its own clock. Exchanges that may lag (``lag=``) lag where the
    wire takes longer than a step.
    Of algorithms that follow each other (``after``) the last one is priced, from the step on at which its time begins; the
    steps before it are run, too, but a dense start (``LocalSGD``, ``DiLoCo``) is not. What one does differently at its own
    beginning (``ChunkSparse(warmup=)``) is priced as it is there: leave it out to price what comes later.

    Args:
        model: the model; its tensors may be on the ``meta`` device, and stay as they are.
        algorithm: any algorithm; None for an optimizer that communicates by itself.
        compute: what one step computes, and when each gradient is there.
        world: number of ranks.
        link: bandwidth and latency of each rank, or of each machine where several ranks share one.
        cluster: machines, links, processor and stragglers; instead of ``world``, ``link``, ``ranks_per_node`` and ``inside``.
        optimizer: makes the optimizer of the parameters that it is called with. It matters where what it remembers travels
            (``GossipGraD``), or it communicates (``OneBitAdam``). By default SGD, with momentum if the algorithm takes that.
        lanes: flows that may be under way at the same time.
        buffers: as in :func:`gossamer.replicate`; for models that have buffers.
        steps: steps to average over, rounded up to whole cycles of the algorithm, after which what travels repeats itself
            (``Cadence.cycle``; where that is more than 512 steps, to whole ``Cadence.period``). Where
            exchanges may lag, from the beginning of one to that of another. By default cycles until two of them take as long
            and send as much, or 8 steps: give a number for an algorithm whose cadence does not say when it repeats itself.
        warmup: steps before these; as many more as let everything be exchanged once: first exchanges may be longer.
        ranks_per_node: how many ranks share a machine, and its link: consecutive ones. By default as many as the algorithm
            says (``Hierarchical(ranks_per_node=)``), else 1.
        inside: the link between ranks of one machine, where several share one; without delay by default.
        overlap_forward: as in :func:`gossamer.replicate`.

    Raises:
        ConfigurationError: a number out of range or of another type, an algorithm that cannot run among so many ranks, a
            moment of a parameter that is not communicated, an ``inside`` where no two ranks share a machine, a cluster beside
            what it says, or whatever :func:`gossamer.replicate` refuses.
    """
    make_optimizer = _check(model, algorithm, compute, optimizer)
    check_whole(1, lanes=lanes, **({} if steps is None else {"steps": steps}))
    check_whole(0, warmup=warmup)
    if cluster is None:
        cluster, nodes = _described(algorithm, world, link, ranks_per_node, inside)
    else:
        check_kind("cluster", cluster, Cluster, "Cluster(machines=Machines(count=4), between=Link(bandwidth=200e6))")
        check_left_out(world=world, link=link, ranks_per_node=ranks_per_node, inside=inside)
        nodes = consecutive(cluster.world, cluster.machines.devices)
    training = Training(
        model=model,
        algorithm=algorithm,
        make_optimizer=make_optimizer,
        compute=compute.at_speed(cluster.machines.speed),
        lanes=lanes,
        buffers=buffers,
        overlap_forward=overlap_forward,
        without=_left_out(model, algorithm, buffers),
        warmup=warmup,
        steps=steps,
    )
    return _predicted(training, cluster, nodes)


def _described(
    algorithm: Algorithm | None, world: int | None, link: Link | None, ranks_per_node: int | None, inside: Link | None
) -> tuple[Cluster, tuple[Group, ...]]:
    """The cluster of ``world`` ranks, and the ranks of each machine: the last one may have fewer."""
    if ranks_per_node is None:
        ranks_per_node = (algorithm.traits.ranks_per_node if algorithm is not None else None) or 1
    check_whole(1, world=world, ranks_per_node=ranks_per_node)
    check_links(link, inside, ranks_per_node)
    assert world is not None
    assert link is not None
    nodes = consecutive(world, ranks_per_node)
    return Cluster(machines=Machines(count=len(nodes), devices=ranks_per_node), between=link, inside=inside), nodes


def _predicted(training: Training, cluster: Cluster, nodes: tuple[Group, ...]) -> StepTime:
    differ = not cluster.stragglers.none or bool(cluster.own)
    found, program = run(training, cluster, Levels(cluster, nodes), records=differ)
    late = waiting_seconds(training, cluster, nodes, program) if differ else 0.0
    compute = training.compute.seconds
    return StepTime(
        step_seconds=found.seconds + late,
        compute_seconds=compute,
        wire_seconds=found.busiest,
        exposed_seconds=(found.exposed if cluster.processor.free else found.seconds - compute) + late,
        bytes_per_step=found.sent,
        messages_per_step=found.messages,
        processor_seconds=found.processing,
        straggler_seconds=late,
    )


def _check(model: nn.Module, algorithm: Algorithm | None, compute: Compute, optimizer: MakeOptimizer | None) -> MakeOptimizer:
    """Refuse what is of another type. Returns what makes the optimizer."""
    check_kind("model", model, nn.Module, "torch.nn.Linear(4, 4, device='meta')")
    if algorithm is not None:
        check_kind("algorithm", algorithm, Algorithm, "Gossip()")
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
