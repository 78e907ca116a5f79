"""Trained: loss over the time that a cluster would take, which nobody has: workers are trained in loopback, and a step takes
what it takes in virtual time.

What is learned does not depend on when, as long as exchanges are waited for. So the two runs are made one after the other:
one has the loss of every step, the other one how long a step takes in the mean.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.comm.loopback import current_runner, loopback
from gossamer.errors import ConfigurationError
from gossamer.replication import replicate_over
from gossamer.simulate.report import Way


class Trainable(Protocol):
    """What a Python file has to define: a model, its optimizer, its loss, and batches of every worker without end."""

    @property
    def build_model(self) -> Callable[[], nn.Module]: ...

    @property
    def build_optimizer(self) -> Callable[[nn.Module], Optimizer]: ...

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]: ...

    @property
    def training_batches(self) -> Callable[[int, int, int], Iterator[tuple[Any, Tensor]]] | None: ...

    @property
    def quality(self) -> Callable[[nn.Module], dict[str, float]] | None: ...


@dataclass(frozen=True, kw_only=True)
class Curve:
    """One method. ``losses``: of each step the mean over workers, before its update; a step takes ``step_seconds``.
    ``quality``: of the average of all replicas at the end, on held-out data, if the file says how."""

    method: str
    step_seconds: float
    losses: list[float]
    quality: dict[str, float]

    def smoothed(self, points: int) -> list[tuple[int, float, float]]:
        """At most so many (step, its end in seconds, mean loss of the steps since the last point)."""
        span = -(-len(self.losses) // points)
        ends = range(span, len(self.losses) + 1, span)
        return [(end, end * self.step_seconds, sum(self.losses[end - span : end]) / span) for end in ends]


def train(task: Trainable, way: Way, world: int, steps: int, seed: int = 0) -> tuple[list[float], dict[str, float]]:
    """The mean loss of each step, and the quality at the end, of ``world`` workers. Deterministic.

    Raises ConfigurationError for exchanges that may be late, as what they bring depends on when; for methods that follow each
    other, whose steps take different times; and for a file without batches.
    """
    cadence = way.algorithm.cadence if way.algorithm is not None else None
    if cadence is not None and (cadence.lag or cadence.changes):
        raise ConfigurationError(
            f"{way.name} cannot be trained in virtual time: its exchanges may be late, or other ones follow, and all steps are "
            "taken to last as long"
        )
    batches = task.training_batches
    if batches is None:
        raise ConfigurationError("the model's file defines no training_batches(rank, world, seed), which --train needs")

    def worker(rank: int) -> tuple[list[float], dict[str, float]]:
        torch.manual_seed(seed)
        model = task.build_model()
        optimizer = task.build_optimizer(model)
        if way.optimizer is not None:
            optimizer = way.optimizer(model.parameters(), lr=optimizer.param_groups[0]["lr"])
        runner = current_runner()
        assert runner is not None
        replica = replicate_over(runner, model, optimizer, way.algorithm, overlap_forward=way.overlap_forward)
        losses = []
        for _, (inputs, targets) in zip(range(steps), batches(rank, world, seed), strict=False):
            optimizer.zero_grad()
            loss = task.loss(model(inputs), targets)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with replica.consensus():
            quality = _quality(task, model) if rank == 0 else {}
        replica.close()
        return losses, quality

    found = loopback(worker, world)
    return [sum(each) / world for each in zip(*(losses for losses, _ in found), strict=True)], found[0][1]


def _quality(task: Trainable, model: nn.Module) -> dict[str, float]:
    if task.quality is None:
        return {}
    model.eval()
    with torch.no_grad():
        found = task.quality(model)
    model.train()
    return found
