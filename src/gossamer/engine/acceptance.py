"""Acceptance: whether an algorithm can run with a model, its optimizers and the options of a replica."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.codecs import kernels
from gossamer.comm.runner import Runner
from gossamer.engine.apply import prepare
from gossamer.engine.arguments import check_delay, check_lag, check_overlap
from gossamer.engine.checks import check_sparse, named_parameters
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
    """How the buffers are kept. Loads and compiles what the algorithm computes with.

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
    _load_kernels(algorithm, model)
    if overlap_forward:
        check_overlap(algorithm, optimizers, scaler, model)
    if algorithm.part("gradients") is not None:
        check_sparse(model)
    prepare(algorithm, {name: as_real(local(tensor.detach())) for name, tensor in travelling(algorithm, model, mode).items()})
    return mode


def travelling(algorithm: Algorithm, model: nn.Module, buffers: Buffers) -> dict[str, Tensor]:
    """The trainable parameters, and the buffers that are averaged with them, by name."""
    trainable: dict[str, Tensor] = {name: p for name, p in named_parameters(model).items() if p.requires_grad}
    return trainable | (averaged(model) if buffers == "average" and algorithm.part("weights") else {})


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
