"""Acceptance: whether an algorithm can run with a model, its optimizers and the options of a replica."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import Runner
from gossamer.engine.apply import prepare
from gossamer.engine.arguments import check_delay, check_lag, check_overlap
from gossamer.engine.checks import check_ignored, check_sparse, named_parameters
from gossamer.engine.module_buffers import Buffers, averaged, check_buffers, resolve_buffers
from gossamer.engine.sharding import local
from gossamer.memory import as_real


def accept(
    algorithm: Algorithm,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    runner: Runner,
    buffers: Buffers | None,
    scaler: Any,
    overlap_forward: bool,
) -> Buffers:
    """How the buffers are kept. Compiles the loops by which weights are changed.

    Raises:
        ConfigurationError: it cannot run among so many ranks, or on these nodes, or with these arguments.
    """
    mode = resolve_buffers(buffers, algorithm.subject)
    algorithm.check(runner.world)
    check_delay(algorithm)
    if runner.nodes is not None:
        algorithm.check(runner.world, runner.nodes)
    check_lag(algorithm, optimizers, mode, scaler)
    check_buffers(algorithm, model, mode)
    if overlap_forward:
        check_overlap(algorithm, optimizers, scaler, model)
    if algorithm.part("gradients") is not None:
        check_sparse(model)
        check_ignored(model)
    prepare(algorithm, {name: as_real(local(tensor.detach())) for name, tensor in travelling(algorithm, model, mode).items()})
    return mode


def travelling(algorithm: Algorithm, model: nn.Module, buffers: Buffers) -> dict[str, Tensor]:
    """The trainable parameters, and the buffers that are averaged with them, by name."""
    trainable: dict[str, Tensor] = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    return trainable | (averaged(model) if buffers == "average" and algorithm.part("weights") else {})
