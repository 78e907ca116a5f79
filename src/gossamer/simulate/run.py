"""Run: a replica of a stand-in for the model, trained in virtual time on one cluster."""

import gc
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.codecs.kernels.meta import Watched
from gossamer.engine.module_buffers import Buffers
from gossamer.hooks import OwnHook
from gossamer.replication import replicate_over
from gossamer.simulate.clock import Clock
from gossamer.simulate.clocked import ClockedRunner, Wire
from gossamer.simulate.cluster import Cluster
from gossamer.simulate.levels import Levels
from gossamer.simulate.processor import Processing
from gossamer.simulate.profile import Compute
from gossamer.simulate.program import Program
from gossamer.simulate.stand_in import leave_to_torch, stand_in, take_time
from gossamer.simulate.valueless import Valueless
from gossamer.simulate.window import Totals, Window, per_step

MakeOptimizer = Callable[..., Optimizer]
"""Called with the parameters: ``torch.optim.AdamW``, or ``partial(torch.optim.SGD, lr=0.1, momentum=0.9)``."""


def like(optimizer: Optimizer) -> MakeOptimizer:
    """Makes optimizers of the same kind, with the same settings.

    Not all settings can be given: ``AdamW`` keeps one (``decoupled_weight_decay``) that only its base class takes.
    """
    kind = type(optimizer)
    taken = signature(kind).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in taken.values()):
        return partial(_made, kind, optimizer.defaults)
    return partial(_made, kind, {name: value for name, value in optimizer.defaults.items() if name in taken})


def _made(kind: Callable[..., Optimizer], settings: Mapping[str, Any], parameters: Any) -> Optimizer:
    return kind(parameters, **settings)


@dataclass(frozen=True, kw_only=True)
class Training:
    """What is trained, and how."""

    model: nn.Module
    algorithm: Algorithm | None
    make_optimizer: MakeOptimizer
    compute: Compute
    lanes: int
    buffers: Buffers | None
    overlap_forward: bool
    without: Collection[str]
    """Names of buffers that the stand-in does not have."""
    warmup: int
    steps: int | None


@contextmanager
def _uncollected() -> Iterator[None]:
    """Inside, Python does not search for garbage in cycles: what a run records only grows, and each search goes through it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def run(training: Training, cluster: Cluster, levels: Levels, records: bool = True) -> tuple[Totals, Program]:
    """What a step takes, in the mean over steps in steady state, where all workers compute for as long; and what they did.

    Without ``records`` nobody asks what they did: the program does not say what flows do, and need not have all partners.
    """
    clock = Clock()
    processing = Processing(clock, cluster.processor, max(map(len, levels.nodes)))
    wire = Wire(clock, levels, processing, records)
    algorithm, compute = training.algorithm, training.compute
    runner = ClockedRunner(clock, wire, training.lanes, levels.nodes, algorithm.cadence.lag if algorithm else 0)
    twin = stand_in(training.model, compute, runner.compute, training.without)
    stepping = training.make_optimizer([parameter for parameter in twin.parameters() if parameter.requires_grad])
    leave_to_torch(stepping)
    take_time(stepping, compute.optimizer, runner.compute, lambda: processing.ignore(False))
    replica = replicate_over(
        runner,
        twin,
        stepping,
        algorithm,
        buffers=training.buffers,
        overlap_forward=training.overlap_forward,
        dense_start=False,
    )
    stepping.register_step_pre_hook(OwnHook(lambda *_: processing.ignore(True)))

    def step() -> None:
        stepping.zero_grad()
        twin().backward()
        stepping.step()
        processing.ignore(False)

    machines = len(levels.nodes)
    alike = not records and machines == levels.world and cluster.across is None
    window = Window.of(
        replica.algorithm, levels.world, machines, training.warmup, training.steps, training.overlap_forward, alike
    )
    costs = processing.costs
    kernels = Watched(processing.kernel) if costs else nullcontext()
    with _uncollected(), kernels, Valueless(processing.wrote if costs else None):
        return per_step(step, runner, wire, window)
