"""Replication: a replica of a model over a runner that is there."""

from collections.abc import Callable, Sequence
from itertools import chain
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer._version import __version__
from gossamer.algorithms.after import with_dense_start
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.in_optimizer import InOptimizer
from gossamer.codecs.kernels import compiler_for
from gossamer.comm.runner import Runner, give_up
from gossamer.engine.acceptance import accept, travelling
from gossamer.engine.agreement import agree, same_from_rank
from gossamer.engine.arguments import Synchronize, check_arguments, check_synchronize
from gossamer.engine.assembly import Parts, assemble, measure_noise
from gossamer.engine.attach import attach, detach
from gossamer.engine.checks import Ignored, held_by, named_buffers, named_parameters, release
from gossamer.engine.consensus import contents
from gossamer.engine.exact import copies_from_rank
from gossamer.engine.module_buffers import Buffers
from gossamer.engine.rehearsal import rehearse_all
from gossamer.engine.sharding import check_sharding, described, reshard
from gossamer.optim.communicating import Communicating
from gossamer.replica import Replica


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
    statistics: bool = False,
    dense_start: bool = True,
    begin: Callable[[Replica, Parts], None] | None = None,
) -> Replica:
    """:func:`replicate` over a runner that is there; it is closed if this fails. ``begin``: called with what was made.
    ``dense_start``: with the one that the algorithm asks for."""
    ignored = None
    try:
        ignored = Ignored(model, ignore)
        if isinstance(model, nn.Module):
            reshard(model)
        optimizers = check_arguments(model, optimizer_or_optimizers, algorithm, scaler)
        algorithm = algorithm if algorithm is not None else _default(optimizers)
        algorithm = with_dense_start(algorithm) if dense_start else algorithm
        accumulate = check_synchronize(synchronize, algorithm, scaler, overlap_forward, model)
        mode = accept(algorithm, model, optimizers, runner, buffers, scaler, overlap_forward)
        parameters, moved = named_parameters(model), travelling(algorithm, model, mode)
        if runner.world > 1:
            rehearse_all(algorithm, moved, optimizers, runner)
        check_sharding(parameters, runner.members if runner.world > 1 else (), runner.rank)
        runner.agree_on_opening(devices={tensor.device for tensor in (*parameters.values(), *moved.values())})
        if runner.nodes is not None:
            algorithm.check(runner.world, runner.nodes)
        facts = _facts(model, optimizers, algorithm, mode, scaler, overlap_forward, accumulate)
        agree(runner, facts | {"choice": "an algorithm that is given" if begin is None else "fidelity= or plan="})
        _start_equal(runner, model, optimizers)
        parts = _attached(model, optimizers, algorithm, runner, mode, scaler, overlap_forward, accumulate)
        parts.ignored, parts.buffers_asked, parts.synchronize_asked = ignored, buffers, synchronize
        if statistics and runner.world > 1:
            measure_noise(parts)
        replica = Replica(parts)
        if begin is not None:
            begin(replica, parts)
    except BaseException as error:
        if ignored is not None:
            ignored.release()
        give_up(runner, error)
        raise
    return replica


def _attached(
    model: nn.Module,
    optimizers: tuple[Optimizer, ...],
    algorithm: Algorithm,
    runner: Runner,
    buffers: Buffers,
    scaler: Any,
    overlap_forward: bool,
    accumulate: float,
) -> Parts:
    """What the replica consists of. If it cannot be made, model and optimizers are as they were: another may be tried."""
    try:
        return assemble(model, optimizers, attach(algorithm, optimizers), runner, buffers, scaler, overlap_forward, accumulate)
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
    accumulate: float,
) -> dict[str, str]:
    parameters = named_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    devices = sorted({parameter.device.type for parameter in parameters.values()})
    return {
        "versions": f"gossamer {__version__}, torch {torch.__version__.split('+')[0]}",
        "kernels": ", ".join(f"{kind}: {compiler_for(kind)}" for kind in devices),
        "algorithm": repr(algorithm),
        "options": f"buffers={buffers!r}, scaler={'yes' if scaler is not None else 'no'}, overlap_forward={overlap_forward}, "
        f"synchronize={'step' if accumulate == inf else int(accumulate) + 1}",
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
    parameters, buffers = named_parameters(model), named_buffers(model)
    same_from_rank(runner, [*parameters.values(), *buffers.values()], 0)
    if runner.world > 1:
        copies = [copies_from_rank(runner, each, parameters.values(), 0) for each in optimizers]
        named: dict[str, Tensor] = {f"parameter {name!r}": p for name, p in parameters.items()}
        named |= {f"buffer {name!r}": b for name, b in buffers.items()}
        named |= {f"an optimizer's copy {n}": copy for n, copy in enumerate(chain.from_iterable(copies))}
        hint = "Where one has not kept what was copied into it, another shares its memory on some rank: clone() one of them"
        agree(runner, {"the initial values after the broadcast": contents(named)}, hint)
