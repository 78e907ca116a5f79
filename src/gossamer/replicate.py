"""Entry point: makes a model's training data-parallel, in place, with one line."""

import logging
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer._version import __version__
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.in_optimizer import InOptimizer
from gossamer.codecs import kernels
from gossamer.codecs.kernels import compiler_for
from gossamer.comm.connect import connect
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import agree, checksum, same_from_rank
from gossamer.engine.alarms import give_up
from gossamer.engine.apply import prepare
from gossamer.engine.arguments import (
    Synchronize,
    check_arguments,
    check_delay,
    check_lag,
    check_overlap,
    check_synchronize,
)
from gossamer.engine.assembly import assemble
from gossamer.engine.attach import attach, detach
from gossamer.engine.checks import (
    Ignored,
    check_sparse,
    held_by,
    named_buffers,
    named_parameters,
    release,
)
from gossamer.engine.exact import copies_from_rank
from gossamer.engine.module_buffers import Buffers, averaged, check_buffers, resolve_buffers
from gossamer.engine.sharding import check_sharding, described, local, reshard
from gossamer.memory import as_real
from gossamer.optim.communicating import Communicating
from gossamer.replica import Replica

_logger = logging.getLogger("gossamer")


def replicate(
    model: nn.Module,
    optimizer_or_optimizers: Optimizer | Sequence[Optimizer],
    algorithm: Algorithm | None = None,
    *,
    group: Any = None,
    mesh: Any = None,
    scaler: Any = None,
    buffers: Buffers | None = None,
    timeout: float | timedelta | None = None,
    overlap_forward: bool = False,
    ignore: Sequence[str | nn.Module] = (),
    synchronize: Synchronize | None = None,
) -> Replica:
    """Make the training of ``model`` data-parallel over the ranks of a process group.

    Works in place: the model's class and the keys of its ``state_dict`` stay as they are. Every rank calls it with the
    same arguments, after the model is on its device and the optimizer is made; rank 0's parameters and buffers are
    copied to all. Then train as on one worker.

    Args:
        model: any module; not wrapped in DDP or FSDP1. Its parameters may be sharded over other dimensions of a mesh (DTensors:
            ``fully_shard``, ``parallelize_module``): then ``group`` or ``mesh`` has the ranks with the same part of the model.
        optimizer_or_optimizers: the optimizer, or a sequence of them; together they hold the trainable parameters.
        algorithm: the relaxation; exact :class:`AllReduce` by default.
        group: a process group; the default group if none is given. Without any, a world of one. What moves tensors is the
            backend that it has for the device of the parameters (which all lie on one): NCCL, or Gloo. On a GPU Gloo's go
            through the host's memory. GPUs are supported by construction and by tests with fakes; none has run this yet.
        mesh: a one-dimensional ``DeviceMesh``, instead of ``group``. With :class:`Hierarchical`, one of two dimensions:
            machines, and the workers of each.
        scaler: a ``torch.amp.GradScaler``; a skipped step is then agreed by all ranks.
        buffers: ``"broadcast"`` (rank 0's, at the end of backward; the default for gradient algorithms),
            ``"average"`` (with the weights; the default for weight algorithms) or ``"local"``.
        timeout: seconds (or a ``timedelta``) that an exchange may take; the process group's by default. A late rank is
            named in a warning after ten seconds.
        overlap_forward: let gradients travel during the next forward pass too: each module waits for its own just before it
            computes, and its parameters are updated then, with the hyper-parameters of the step that you took. For gradient
            algorithms, from the third step on; pays where the exchange takes longer than backward. Between ``backward()`` and
            the next forward pass no parameter has a gradient (so do not clip, scale or log them), and parameters are as
            before the step; reading a ``state_dict`` of the model or the optimizer, and ``wait_for_exchanges()``, bring them
            up to date, a copy or a pickle of the model does not. The optimizer must update each parameter by itself, as all
            of ``torch.optim`` do; its step, and hooks on it, run once per bucket. Take a step after every backward pass
            (accumulate inside ``no_sync()``), and call modules rather than use their parameters in another way.
        ignore: what is left to each rank (experts, sharded embeddings): modules of the model, or names of its modules,
            parameters or buffers. It is neither copied nor exchanged nor compared, and may have another shape on each rank; the
            optimizers may hold it. Beside what the model names for DDP (``_ddp_params_and_buffers_to_ignore``), where it is
            named until the replica is closed.
        synchronize: when gradients are exchanged: ``"backward"`` (the default), during each pass outside of ``no_sync()``, or
            ``"step"``, all that have accumulated once, when an optimizer's step begins, or in :meth:`Replica.synchronize`
            before it (where gradients are clipped, say). For pipelines (``torch.distributed.pipelining``), whose micro-batches
            are backward passes, and for accumulation without ``no_sync()``. Weights are exchanged once per step anyway.

    Raises:
        ConfigurationError: arguments that cannot work, with the reason.
        DisagreementError: on every rank, if ranks differ in version, algorithm, model or options.
    """
    runner = connect(group, mesh, timeout, by_machine=isinstance(algorithm, Algorithm) and None in algorithm.traits.nodes)
    replica = replicate_over(
        runner,
        model,
        optimizer_or_optimizers,
        algorithm,
        scaler=scaler,
        buffers=buffers,
        overlap_forward=overlap_forward,
        ignore=ignore,
        synchronize=synchronize,
    )
    if runner.rank == 0:
        _logger.info("replicating %s over %d ranks with %r", type(model).__name__, runner.world, replica.algorithm)
    return replica


def replicate_over(
    runner: Runner,
    model: nn.Module,
    optimizer_or_optimizers: Optimizer | Sequence[Optimizer],
    algorithm: Algorithm | None = None,
    *,
    scaler: Any = None,
    buffers: Buffers | None = None,
    overlap_forward: bool = False,
    ignore: Sequence[str | nn.Module] = (),
    synchronize: Synchronize | None = None,
) -> Replica:
    """:func:`replicate` over a runner that is there; it is closed if this fails."""
    ignored = None
    try:
        ignored = Ignored(model, ignore)
        if isinstance(model, nn.Module):
            reshard(model)
        optimizers = check_arguments(model, optimizer_or_optimizers, algorithm, scaler)
        algorithm = algorithm if algorithm is not None else _default(optimizers)
        mode = resolve_buffers(buffers, algorithm.subject)
        algorithm.check(runner.world)
        check_delay(algorithm)
        check_lag(algorithm, optimizers, mode, scaler)
        check_buffers(algorithm, model, mode)
        _load_kernels(algorithm, model)
        at_step = check_synchronize(synchronize, algorithm, scaler, overlap_forward, model)
        if overlap_forward:
            check_overlap(algorithm, optimizers, scaler, model)
        if algorithm.part("gradients") is not None:
            check_sparse(model)
        parameters = named_parameters(model)
        beside = averaged(model) if mode == "average" and algorithm.part("weights") else {}
        travelling = {name: p for name, p in parameters.items() if p.requires_grad} | beside
        prepare(algorithm, {name: as_real(local(tensor.detach())) for name, tensor in travelling.items()})
        check_sharding(parameters, runner.members if runner.world > 1 else (), runner.rank)
        runner.agree_on_opening(devices={tensor.device for tensor in (*parameters.values(), *beside.values())})
        if runner.nodes is not None:
            algorithm.check(runner.world, runner.nodes)
        agree(runner, _facts(model, optimizers, algorithm, mode, scaler, overlap_forward, at_step))
        _start_equal(runner, model, optimizers)
        replica = _attached(model, optimizers, algorithm, runner, mode, scaler, overlap_forward, ignored, at_step)
    except BaseException as error:
        if ignored is not None:
            ignored.release()
        give_up(runner, error)
        raise
    return replica


_CASTS = ("gossamer.codecs.base", "gossamer.codecs.cast", "gossamer.codecs.wire")
"""Of codecs, what computes in plain torch."""


def _load_kernels(algorithm: Algorithm, model: nn.Module) -> None:
    """Load what the codecs of an algorithm compute with. That takes every rank another time, and in the first exchange others
    would wait for it."""
    if any(map(_encodes, _parts(algorithm))):
        for kind in sorted({str(parameter.device) for parameter in named_parameters(model).values()} - {"meta"}):
            kernels.load(kind)


def _parts(algorithm: Algorithm) -> Iterator[Algorithm]:
    """An algorithm, and those in its fields."""
    yield algorithm
    for each in (value for field in fields(algorithm) for value in _within(getattr(algorithm, field.name))):
        if isinstance(each, Algorithm):
            yield from _parts(each)


def _within(value: object) -> Iterator[object]:
    """A field's value, or what its tuples hold."""
    if isinstance(value, tuple | list):
        for each in value:
            yield from _within(each)
    else:
        yield value


def _encodes(algorithm: Algorithm) -> bool:
    """Whether it has a codec, or is written with parts of some, that have kernels."""
    own = [type(getattr(algorithm, field.name)) for field in fields(algorithm)]
    used = [*own, *(each for each in vars(sys.modules[type(algorithm).__module__]).values() if callable(each))]
    modules = {str(getattr(each, "__module__", "")) for each in used}
    return any(name.startswith("gossamer.codecs.") for name in modules - set(_CASTS))


def _attached(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    algorithm: Algorithm,
    runner: Runner,
    buffers: Buffers,
    scaler: Any,
    overlap_forward: bool,
    ignored: Ignored,
    at_step: bool,
) -> Replica:
    """The replica. If it cannot be made, model and optimizers are as they were: another algorithm may be tried."""
    try:
        parts = assemble(model, optimizers, attach(algorithm, optimizers), runner, buffers, scaler, overlap_forward, at_step)
        parts.ignored = ignored
        return Replica(parts)
    except BaseException:
        detach(algorithm, optimizers)
        release(named_parameters(model).values())
        raise


def _default(optimizers: Sequence[Optimizer]) -> Algorithm:
    return InOptimizer() if isinstance(optimizers[0], Communicating) else AllReduce()


def _facts(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    algorithm: Algorithm,
    buffers: Buffers,
    scaler: Any,
    overlap_forward: bool,
    at_step: bool,
) -> dict[str, str]:
    parameters = named_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    devices = sorted({parameter.device.type for parameter in parameters.values()})
    return {
        "versions": f"gossamer {__version__}, torch {torch.__version__.split('+')[0]}",
        "kernels": ", ".join(f"{kind}: {compiler_for(kind)}" for kind in devices),
        "algorithm": repr(algorithm),
        "options": f"buffers={buffers!r}, scaler={'yes' if scaler is not None else 'no'}, overlap_forward={overlap_forward}, "
        f"synchronize={'step' if at_step else 'backward'!r}",
        "model parameters": "\n".join(
            f"{name}: {p.dtype} {list(p.shape)} {'trainable' if p.requires_grad else 'frozen'}{described(p)}"
            for name, p in parameters.items()
        ),
        "model buffers": "\n".join(f"{name}: {b.dtype} {list(b.shape)}" for name, b in named_buffers(model).items()),
        "optimizers": "\n".join(f"{_described(o)}: {names[id(p)]}" for o in optimizers for p in held_by(o) if id(p) in names),
    }


def _described(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"{name} ({optimizer.algorithm!r})" if isinstance(optimizer, Communicating) else name


def _start_equal(runner: Runner, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Copy rank 0's parameters and buffers, and optimizers' exact copies, to all ranks, and prove that they arrived."""
    parameters = list(named_parameters(model).values())
    tensors = [*parameters, *named_buffers(model).values()]
    same_from_rank(runner, tensors, 0)
    if runner.world > 1:
        for optimizer in optimizers:
            tensors += copies_from_rank(runner, optimizer, parameters, 0)
        agree(runner, {"the initial values after the broadcast": checksum(tensors)})
