"""Switching: another algorithm takes the place of a replica's, between two steps.

The loop, its counters and the hooks on optimizer steps stay; everything else is made anew. What gradients exchanged so far have
left unsent is handed over (``Algorithm.hand_over``) and travels in the next exchange. Replicas whose weights differ go on from
their average where the next algorithm needs equal ones, or counts them in another way.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import Runner, alarming
from gossamer.engine import weighing
from gossamer.engine.acceptance import accept, travelling
from gossamer.engine.agreement import agree
from gossamer.engine.arguments import check_is_algorithm, check_synchronize
from gossamer.engine.assembly import Parts, assemble, remove_hooks
from gossamer.engine.attach import attach, detach
from gossamer.engine.checks import held_by
from gossamer.engine.gradients import GradientSync
from gossamer.engine.lagging import most_of_all
from gossamer.engine.module_buffers import Buffers, average
from gossamer.engine.rehearsal import rehearse_all
from gossamer.engine.sharding import local
from gossamer.engine.unsent import INHERITED
from gossamer.engine.usage import USAGE
from gossamer.errors import ConfigurationError, UsageError
from gossamer.memory import wide
from gossamer.optim.gossip_adamw import stop_telling


def switch(
    parts: Parts,
    algorithm: Algorithm,
    come_together: Callable[[str], None],
    step: Callable[[], int],
    become_average: Callable[[], None],
) -> Parts:
    """The parts of the replica with ``algorithm``. Collective.

    ``come_together`` waits for all ranks to make the call of this name; ``become_average`` leaves the average of all in
    the model. ``step``: of the replica.

    Raises:
        ConfigurationError: this replica cannot run it. All ranks find that alike, and go on as before.
        DisagreementError: ranks mean another algorithm.
        UsageError: it is not between two steps.
    """
    _check_moment(parts)
    with alarming(parts.runner):
        come_together("switch()")
        if parts.overlap is not None:
            parts.overlap.conclude()
        agree(parts.runner, {"the algorithm to switch to": repr(algorithm)})
        unsent, number = _unsent(parts), most_of_all(parts.runner, step())  # steps are counted on from there
    buffers = _check_algorithm(parts, algorithm)
    if parts.runner.world > 1:
        rehearse_all(algorithm, travelling(algorithm, parts.model, buffers), (), parts.runner)
    attached = _attached(parts, algorithm)
    with alarming(parts.runner):
        if parts.weights:
            _bring_together(parts, algorithm, become_average)
        remove_hooks(parts)
        overlap = parts.overlap is not None
        accumulate = check_synchronize(parts.synchronize_asked, algorithm, parts.scaler, overlap, parts.model)
        parts.loop.accumulate = accumulate
        new = assemble(
            parts.model,
            parts.optimizers,
            attached,
            parts.runner,
            buffers,
            parts.scaler,
            overlap,
            accumulate,
            before=parts,
            unsent=unsent,
        )
        _go_on(parts, new, number, unsent)
    return new


def _check_moment(parts: Parts) -> None:
    """Raise UsageError unless a step has just been taken, and all ranks train."""
    loop = parts.loop
    if parts.join.on:
        raise UsageError("switch() inside join(): a rank whose batches have ended would not take part; call it after the block")
    if loop.in_backward or loop.partial_step or (loop.waiting and len(loop.waiting) == len(parts.optimizers)):
        raise UsageError(
            f"rank {parts.runner.rank}: switch() between backward() and optimizer.step(): gradients are there "
            "that the algorithm of now has averaged; call it after the step"
        )


def _check_algorithm(parts: Parts, algorithm: Algorithm) -> Buffers:
    """How buffers are kept with ``algorithm``. Raises ConfigurationError if this replica cannot run it."""
    check_is_algorithm(algorithm)
    if parts.links:
        name = type(parts.optimizers[0]).__name__
        raise ConfigurationError(f"{name} communicates by itself: there is no algorithm in whose place another one could be")
    overlap = parts.overlap is not None
    if parts.statistics.samples is not None:
        weighing.check(parts, algorithm)
    check_synchronize(parts.synchronize_asked, algorithm, parts.scaler, overlap, parts.model)
    return accept(algorithm, parts.model, parts.optimizers, parts.runner, parts.buffers_asked, parts.scaler, overlap)


def make_equal(parts: Parts, become_average: Callable[[], None]) -> None:
    """Let all replicas of weights, and what their optimizers remember, become their averages. Collective."""
    parts.weights.conclude()
    become_average()
    _average_histories(parts.runner, parts.optimizers)


def _bring_together(parts: Parts, algorithm: Algorithm, become_average: Callable[[], None]) -> None:
    """Make replicas of weights as equal as ``algorithm`` needs them."""
    parts.weights.conclude()
    if _needs_average(parts.algorithm, algorithm):
        become_average()
    if algorithm.part("gradients") is not None:
        _average_histories(parts.runner, parts.optimizers)


def _needs_average(before: Algorithm, then: Algorithm) -> bool:
    """Whether replicas of ``before`` must be made equal for ``then``."""
    if then.part("weights") is None or then.part("gradients") is not None or then.traits.moves_mean:
        return True
    return before.traits.weighted or before.traits.moves_mean or before.traits.nodes != then.traits.nodes


def _attached(parts: Parts, algorithm: Algorithm) -> Algorithm:
    """What to run with the optimizers in place of what ran with them; that goes on running if there is nothing."""
    detach(parts.algorithm, parts.optimizers)
    try:
        attached = attach(algorithm, parts.optimizers)
    except BaseException:
        detach(algorithm, parts.optimizers)
        attach(parts.algorithm, parts.optimizers)
        raise
    for optimizer in parts.optimizers:
        stop_telling(optimizer)
    return attached


def _average_histories(runner: Runner, optimizers: Sequence[Optimizer]) -> None:
    """Make what optimizers remember of gradients the mean over all ranks, whose updates are to be equal. Collective."""
    kept = [value for each in optimizers for p in held_by(each) for value in each.state.get(p, {}).values()]
    tensors = [local(value) for value in kept if isinstance(value, Tensor) and value.is_floating_point()]
    agree(runner, {"what the optimizers remember": "\n".join(str(list(tensor.shape)) for tensor in tensors)})
    if tensors:
        with torch.no_grad():
            average(runner, tensors, "the average of what the optimizers remember")


def _unsent(parts: Parts) -> dict[str, Tensor]:
    """This worker's term of the sum that exchanges of gradients conserve, without the gradients of now: by parameter."""
    if parts.gradients is None:
        return dict(parts.unsent.tensors)
    parts.gradients.keep_used()
    return dict(chain.from_iterable(_of_gradients(parts.gradients)))


def _of_gradients(gradients: GradientSync) -> list[list[tuple[str, Tensor]]]:
    exchange, found = gradients.exchange, []
    for bucket, handler, state in zip(exchange.buckets, exchange.handlers, exchange.states, strict=True):
        nothing = torch.zeros_like(wide(bucket.flat))
        flat = handler.hand_over(nothing, state, exchange.context(gradients.step))
        again = state.get(INHERITED)
        flat = flat if again is None else flat + again
        if flat is not nothing:
            found.append([pair for pair in zip(bucket.layout.names, bucket.split(flat), strict=True) if pair[0] != USAGE])
    return found


def _go_on(before: Parts, new: Parts, step: int, unsent: Mapping[str, Tensor]) -> None:
    """Count steps on from there, lay gradients out in the order in which they are known to come, and keep what is unsent."""
    new.scale.load(before.scale.saved())
    for sync in new.weights:
        sync.begin()
        sync.steps = step
    if before.weights and not _needs_average(before.algorithm, new.algorithm):
        # Each worker goes on from where it is, and what led there counts as it did.
        for old, sync in zip(before.weights, new.weights, strict=True):
            sync.samples.load(old.samples.saved(old.exchange.buckets), sync.exchange.buckets)
    if new.gradients is None:
        return
    new.gradients.step = step
    if before.gradients is not None:
        names = [name for name in before.gradients.next_plan.names if name != USAGE]
        new.gradients.load_plan([names], before.gradients.learned, None, anew=True)
    if unsent:
        new.gradients.exchange.states.load_by_name({INHERITED: unsent}, {})
