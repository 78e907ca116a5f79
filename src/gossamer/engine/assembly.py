"""Assembly: what a replica consists of, made once; what is off is not there."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import Runner
from gossamer.engine.arguments import Synchronize
from gossamer.engine.at_step import AtStep
from gossamer.engine.attach import detach
from gossamer.engine.checks import Ignored, held_by, named_parameters
from gossamer.engine.gradients import GradientSync
from gossamer.engine.join import Join
from gossamer.engine.loop import Loop, Subscriber
from gossamer.engine.loss_scale import LossScale
from gossamer.engine.module_buffers import Buffers, BufferSync, named_buffers
from gossamer.engine.noise import NoiseScale
from gossamer.engine.optimizers import OptimizerSync
from gossamer.engine.other_exchanges import OtherExchanges
from gossamer.engine.overlap import ForwardOverlap
from gossamer.engine.sharding import local, with_elements
from gossamer.engine.statistics import Statistics
from gossamer.engine.unaveraged import UnaveragedGradients, ask_how_many
from gossamer.engine.unsent import Unsent
from gossamer.engine.watches import ModelWatch, StateWatch, UnsteppedWeights
from gossamer.engine.weight_syncs import WeightSyncs
from gossamer.optim.communicating import Communicating
from gossamer.optim.gossip_adamw import stop_telling


@dataclass
class Parts:
    """The parts of a replica. ``trainable``: the parameters that were not frozen, by name; ``buffers``: how these are kept."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...]
    algorithm: Algorithm
    runner: Runner
    buffers: Buffers
    parameters: dict[str, Parameter]
    trainable: dict[str, Parameter]
    statistics: Statistics
    watch: ModelWatch
    loop: Loop
    join: Join
    weights: WeightSyncs
    links: list[OptimizerSync]
    scaler: Any = None
    scale: LossScale = field(init=False)
    gradients: GradientSync | None = None
    overlap: ForwardOverlap | None = None
    handles: list[Any] = field(default_factory=list)
    step_handles: list[Any] = field(default_factory=list)
    """Of the hooks on the optimizers' steps: they stay while one algorithm takes the place of another, also inside a step."""
    unsent: Unsent = field(default_factory=lambda: Unsent({}))
    """What an algorithm before this one has not sent, where no gradients are exchanged any more."""
    ignored: Ignored | None = None
    """What is left to each rank."""
    buffers_asked: Buffers | None = None
    synchronize_asked: Synchronize | None = None
    """What the user said of how buffers are kept, and of when gradients are exchanged."""


def assemble(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    algorithm: Algorithm,
    runner: Runner,
    buffers: Buffers,
    scaler: Any = None,
    overlap_forward: bool = False,
    accumulate: float = 0,
    before: Parts | None = None,
    unsent: Mapping[str, Tensor] | None = None,
) -> Parts:
    """Make the parts, connect them to the loop and install the hooks. ``before``: those whose loop and counters go on;
    ``unsent``: what these have not sent of gradients, for one that exchanges none."""
    parameters = named_parameters(model)
    trainable = {name: p for name, p in parameters.items() if p.requires_grad}
    travelling = with_elements(trainable)
    owned = [_owned(travelling, optimizer) for optimizer in optimizers]
    sizes = [sum(local(p).numel() * p.element_size() for p in each.values()) for each in owned]
    statistics = before.statistics if before else Statistics(runner, sizes)
    loop = before.loop if before else Loop(runner, optimizers, model, accumulate)
    weights = WeightSyncs(runner, algorithm, model, optimizers, owned, buffers == "average", statistics)
    links = _links(runner, optimizers, parameters, statistics)
    exchange = weights.exchange_without_step if weights else None
    step = (lambda index: optimizers[index].step()) if links else None
    join = Join(runner, loop, list(trainable.values()), after_step=exchange, in_step=step)
    watch = ModelWatch(model, optimizers, parameters)
    named, steppers = (parameters, trainable), tuple(optimizers)
    parts = Parts(model, steppers, algorithm, runner, buffers, *named, statistics, watch, loop, join, weights, links, scaler)
    if before is not None:
        parts.step_handles, parts.ignored = before.step_handles, before.ignored
        parts.buffers_asked, parts.synchronize_asked = before.buffers_asked, before.synchronize_asked
    _add_gradients(parts, travelling, owned, overlap_forward)
    if parts.gradients is None:
        parts.unsent = Unsent(unsent or {}, trainable)
    of_gradients = None if parts.gradients is None else parts.gradients.exchange
    parts.scale = LossScale(runner, loop, scaler, [held_by(each) for each in optimizers], of_gradients, bool(weights))
    try:
        _connect(parts)
    except BaseException:
        remove_hooks(parts)
        if before is None:
            remove(parts.step_handles)
        raise
    return parts


def _add_gradients(
    parts: Parts, travelling: Mapping[str, Parameter], owned: Sequence[Mapping[str, Parameter]], overlap_forward: bool
) -> None:
    """Exchange gradients, if the algorithm does. ``owned``: the parameters of each optimizer."""
    algorithm = parts.algorithm.part("gradients")
    if algorithm is None:
        return
    alone, names = not parts.weights and not parts.links, [each.keys() for each in owned]
    parts.gradients = GradientSync(parts.runner, parts.loop, algorithm, travelling, parts.statistics, alone, names)
    parts.gradients.exchange.noise = parts.statistics.noise
    if overlap_forward:
        parts.overlap = ForwardOverlap(parts.runner, parts.loop, parts.model, parts.optimizers[0], parts.gradients)
    for sync in parts.weights:
        sync.clock = partial(getattr, parts.gradients, "step")


def measure_noise(parts: Parts) -> None:
    """Measure the gradient noise scale from now on, while gradients are exchanged."""
    parts.statistics.noise = NoiseScale(parts.runner.world)
    if parts.gradients is not None:
        parts.gradients.exchange.noise = parts.statistics.noise


def disassemble(parts: Parts) -> None:
    """The model and the optimizers train alone from now on."""
    detach(parts.algorithm, parts.optimizers)
    for optimizer in parts.optimizers:
        stop_telling(optimizer)
        if isinstance(optimizer, Communicating):
            optimizer.link = None
    remove_hooks(parts)
    remove(parts.step_handles)
    parts.watch.release()


def remove_hooks(parts: Parts) -> None:
    """Nothing is called any more in forward and backward passes."""
    remove(parts.handles)


def remove(handles: Sequence[Any]) -> None:
    """These hooks are called no more."""
    for handle in handles:
        handle.remove()


def _owned(trainable: Mapping[str, Parameter], optimizer: Optimizer) -> dict[str, Parameter]:
    """The trainable parameters of one optimizer."""
    ids = set(map(id, held_by(optimizer)))
    return {name: parameter for name, parameter in trainable.items() if id(parameter) in ids}


def _links(
    runner: Runner, optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter], statistics: Statistics
) -> list[OptimizerSync]:
    """Give each optimizer that communicates by itself its way to the other ranks."""
    names = {id(parameter): name for name, parameter in parameters.items()}
    links: list[OptimizerSync] = []
    for optimizer in optimizers:
        if isinstance(optimizer, Communicating):
            held = {names[id(parameter)]: parameter for parameter in optimizer.parameters()}
            optimizer.link = OptimizerSync(runner, optimizer.algorithm, held, statistics)
            links.append(optimizer.link)
    return links


def _connect(parts: Parts) -> None:
    """Say who is called, in which order, and install the hooks."""
    loop, runner = parts.loop, parts.runner
    subscribers: list[Subscriber] = [parts.watch, *([parts.unsent] if parts.unsent.tensors else [])]
    if loop.accumulate:
        subscribers.append(AtStep(runner.rank, loop))
    gradients = parts.overlap or parts.gradients
    if gradients is not None:
        subscribers.append(gradients)
    by_themselves = parts.buffers == "broadcast" or (parts.buffers == "average" and not parts.weights)
    if by_themselves and runner.world > 1 and named_buffers(parts.model):
        # After the gradients, whose last buckets leave at the end of backward: on a device they share a lane.
        subscribers.append(BufferSync(runner, loop, parts.model, parts.buffers, parts.statistics))
    if parts.scale.on:
        subscribers.append(parts.scale)
    if ask_how_many(parts.optimizers):
        subscribers.append(
            UnaveragedGradients(runner, parts.weights, parts.gradients, parts.optimizers, parts.parameters.values())
        )
    if parts.weights:
        if runner.world > 1:
            owned = [_owned(with_elements(parts.trainable), optimizer) for optimizer in parts.optimizers]
            subscribers.append(StateWatch(runner, parts.algorithm, parts.optimizers, owned))
        subscribers += parts.weights
    if parts.gradients is None and parts.weights:
        unstepped = UnsteppedWeights(runner, next(iter(parts.trainable.values())))
        subscribers.append(unstepped)
        parts.handles.append(unstepped.hook())
    loop.connect([*subscribers, parts.statistics])  # last: it counts what the others do
    _hook(parts)


def _hook(parts: Parts) -> None:
    """Install the hooks of the events that anything is called for."""
    loop = parts.loop
    if parts.gradients is not None:
        parts.handles += parts.gradients.hook()
    elif loop.watches_passes:
        parts.handles += loop.hook_gradients(parts.trainable, {})
    if parts.runner.world > 1 and (parts.gradients is not None or loop.watches_passes):
        parts.handles.append(loop.hook_outputs(parts.model))
    if parts.overlap is not None:
        parts.handles += parts.overlap.hook()
    if parts.runner.world > 1:
        gradients = parts.gradients is not None or bool(parts.links)
        parts.handles += OtherExchanges(parts.runner, parts.trainable, gradients).hook(parts.model)
    if not parts.step_handles:
        parts.step_handles = loop.hook_steps()
