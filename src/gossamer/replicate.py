"""Entry point: makes a model's training data-parallel, in place, with one line."""

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from gossamer._version import __version__
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.in_optimizer import InOptimizer
from gossamer.checks import hint_at_class
from gossamer.codecs.kernels import compiler_for
from gossamer.comm.connect import connect
from gossamer.comm.runner import Runner
from gossamer.errors import ConfigurationError
from gossamer.optim.communicating import Communicating
from gossamer.replica import Replica
from gossamer.sync.agreement import agree, checksum, same_from_rank
from gossamer.sync.alarms import give_up
from gossamer.sync.apply import prepare
from gossamer.sync.assembly import assemble
from gossamer.sync.checks import check_held, check_model, check_optimizers, held_by, named_parameters, release
from gossamer.sync.exact import copies_from_rank
from gossamer.sync.module_buffers import Buffers, averaged, check_buffers, named_buffers, resolve_buffers

logger = logging.getLogger("gossamer")


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
) -> Replica:
    """Make the training of ``model`` data-parallel over the ranks of a process group.

    Works in place: the model's class and the keys of its ``state_dict`` stay as they are. Every rank calls it with the
    same arguments, after the model is on its device and the optimizer is made; rank 0's parameters and buffers are
    copied to all. Then train as on one worker.

    Args:
        model: any module; not wrapped in DDP or FSDP.
        optimizer_or_optimizers: the optimizer, or a sequence of them; together they hold the trainable parameters.
        algorithm: the relaxation; exact :class:`AllReduce` by default.
        group: a process group; the default group if none is given. Without any, a world of one. What moves tensors is the
            backend that it has for the device of the parameters (which all lie on one): NCCL, or Gloo. On a GPU Gloo's go
            through the host's memory. GPUs are supported by construction and by tests with fakes; none has run this yet.
        mesh: a one-dimensional ``DeviceMesh``, instead of ``group``. With :class:`Hierarchical`, one of two dimensions:
            machines, and the workers of each.
        scaler: a ``torch.amp.GradScaler``; a skipped step is then agreed by all ranks.
        buffers: ``"broadcast"`` (rank 0's, before each training forward; the default for gradient algorithms),
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

    Raises:
        ConfigurationError: arguments that cannot work, with the reason.
        DisagreementError: on every rank, if ranks differ in version, algorithm, model or options.
    """
    runner = connect(group, mesh, timeout, by_machine=getattr(algorithm, "asks_for_machines", False) is True)
    try:
        optimizers = _check(model, optimizer_or_optimizers, algorithm, scaler)
        algorithm = algorithm if algorithm is not None else _default(optimizers)
        mode = resolve_buffers(buffers, algorithm.subject)
        algorithm.check(runner.world)
        _check_lag(algorithm, optimizers, mode, scaler)
        check_buffers(algorithm, model, mode)
        if overlap_forward:
            _check_overlap(algorithm, optimizers, scaler, model)
        travelling = named_parameters(model) | (averaged(model) if mode == "average" and algorithm.part("weights") else {})
        prepare(algorithm, travelling)
        runner.agree_on_opening(devices={tensor.device for tensor in travelling.values()})
        if runner.nodes is not None:
            algorithm.check_machines(runner.nodes)
        agree(runner, _facts(model, optimizers, algorithm, mode, scaler, overlap_forward))
        _start_equal(runner, model, optimizers)
        replica = _attached(model, optimizers, algorithm, runner, mode, scaler, overlap_forward)
    except BaseException as error:
        give_up(runner, error)
        raise
    if runner.rank == 0:
        logger.info("replicating %s over %d ranks with %r", type(model).__name__, runner.world, algorithm)
        _advise(optimizers, algorithm, runner.world)
    return replica


def _advise(optimizers: Sequence[Optimizer], algorithm: Algorithm, world: int) -> None:
    """Tell of what works, but worse than something else."""
    adams = [type(optimizer).__name__ for optimizer in optimizers if isinstance(optimizer, _ADAMS)]
    if adams and world > 1 and algorithm.part("weights") is not None and not algorithm.exchanges_history:
        logger.warning(
            "%s divides by the size of this worker's own gradient, most of which may be noise that averaging would have "
            "removed: with %r, which averages weights, gossamer.optim.GossipAdamW learns faster", adams[0], algorithm
        )  # fmt: skip


_ADAMS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam)


def _attached(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    algorithm: Algorithm,
    runner: Runner,
    buffers: Buffers,
    scaler: Any,
    overlap_forward: bool,
) -> Replica:
    """The replica. If it cannot be made, model and optimizers are as they were: another algorithm may be tried."""
    try:
        return Replica(assemble(model, optimizers, algorithm.attach(optimizers), runner, buffers, scaler, overlap_forward))
    except BaseException:
        algorithm.detach(optimizers)
        release(named_parameters(model).values())
        raise


def _check(model: Any, optimizer_or_optimizers: Any, algorithm: Any, scaler: Any) -> tuple[Optimizer, ...]:
    if algorithm is not None and not isinstance(algorithm, Algorithm):
        raise ConfigurationError(
            f"algorithm must be an instance of a gossamer algorithm; got {algorithm!r}{hint_at_class(algorithm)}"
        )
    check_model(model)
    optimizers = check_optimizers(optimizer_or_optimizers)
    check_held(named_parameters(model), optimizers)
    if scaler is not None and not callable(getattr(scaler, "is_enabled", None)):
        raise ConfigurationError(f"scaler must be a torch.amp.GradScaler; got {type(scaler).__name__}")
    communicating = [o for o in optimizers if isinstance(o, Communicating)]
    if communicating and algorithm is not None:
        raise ConfigurationError(
            f"{type(communicating[0]).__name__} communicates by itself: replicate() takes no algorithm with it"
        )
    if communicating and len(communicating) < len(optimizers):
        raise ConfigurationError(f"{type(communicating[0]).__name__} communicates by itself: all optimizers must, or none")
    return optimizers


def _check_lag(algorithm: Algorithm, optimizers: Sequence[Optimizer], buffers: Buffers, scaler: Any) -> None:
    """Refuse what binds all ranks to the same step, or to one order of several exchanges, where they may lag."""
    if not algorithm.may_lag:
        return
    reasons = {
        "scaler= makes them agree in every step": scaler is not None,
        "buffers='broadcast' moves those in every step": buffers == "broadcast",
        "the weights of several optimizers would be exchanged in another order on each": len(optimizers) > 1,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"{algorithm!r} lets ranks be at different steps, but {reason}; set lag=0, or change that")


def _check_overlap(algorithm: Algorithm, optimizers: Sequence[Optimizer], scaler: Any, model: nn.Module) -> None:
    """Refuse what needs all gradients at once, or has none to wait for."""
    reasons = {
        f"{type(optimizers[0]).__name__} communicates by itself": isinstance(optimizers[0], Communicating),
        f"{algorithm!r} moves weights, which travel beside the next forward and backward pass anyway": (
            algorithm.part("gradients") is None or algorithm.part("weights") is not None
        ),
        "there is more than one optimizer, so parts of a step would not be known to belong together": len(optimizers) > 1,
        "a GradScaler looks at all gradients before the step": scaler is not None,
        "a compiled model calls its modules inside of compiled code: give the model as it is, uncompiled": (
            hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None
        ),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"overlap_forward=True cannot be used: {reason}")


def _default(optimizers: Sequence[Optimizer]) -> Algorithm:
    return InOptimizer() if isinstance(optimizers[0], Communicating) else AllReduce()


def _facts(
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    algorithm: Algorithm,
    buffers: Buffers,
    scaler: Any,
    overlap_forward: bool,
) -> dict[str, str]:
    parameters = named_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    devices = sorted({parameter.device.type for parameter in parameters.values()})
    return {
        "versions": f"gossamer {__version__}, torch {torch.__version__.split('+')[0]}",
        "kernels": ", ".join(f"{kind}: {compiler_for(kind)}" for kind in devices),
        "algorithm": repr(algorithm),
        "options": f"buffers={buffers!r}, scaler={'yes' if scaler is not None else 'no'}, overlap_forward={overlap_forward}",
        "model parameters": "\n".join(
            f"{name}: {p.dtype} {list(p.shape)} {'trainable' if p.requires_grad else 'frozen'}"
            for name, p in parameters.items()
        ),
        "model buffers": "\n".join(f"{name}: {b.dtype} {list(b.shape)}" for name, b in named_buffers(model).items()),
        "optimizers": "\n".join(f"{_described(o)}: {names[id(p)]}" for o in optimizers for p in held_by(o)),
    }


def _described(optimizer: Optimizer) -> str:
    name = type(optimizer).__name__
    return f"{name} ({optimizer.algorithm!r})" if isinstance(optimizer, Communicating) else name


def _start_equal(runner: Runner, model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Copy rank 0's parameters and buffers, and optimizers' exact copies, to all ranks, and prove that they arrived."""
    tensors = [*named_parameters(model).values(), *named_buffers(model).values()]
    same_from_rank(runner, tensors, 0)
    if runner.world > 1:
        for optimizer in optimizers:
            tensors += copies_from_rank(runner, optimizer, 0)
        agree(runner, {"the initial values after the broadcast": checksum(tensors)})
