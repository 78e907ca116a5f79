"""Quality run: one way to train, evaluated now and then while the clock stands still.

A script of the lab (or of torchrun); rank 0 prints JSON lines: a header, evaluations, and in between where it is.

    gossamer lab --hosts 4 --rate 200mbit -- -m benchmarks.studies.quality_run --workload examples/02_convnet.py \\
        --method ddp --until 0.905 --seconds 1200
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.studies.crossing import crossing
from benchmarks.studies.training import training_of
from gossamer.bench.catalogue import find_workload
from gossamer.bench.methods import join, parse_method
from gossamer.bench.peers import BASELINE, PEERS, Joined
from gossamer.bench.ranks import of_all
from gossamer.bench.workload import Quality, Workload
from gossamer.engine.module_buffers import floating, named_buffers
from gossamer.errors import ConfigurationError
from gossamer.replica import Replica

_TELL_EVERY = 1.0

Batches = Iterable[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class Goal:
    """When a run ends: at the first evaluation after ``seconds``, or once the quality has reached ``until``."""

    seconds: float
    until: float | None
    eval_every: int
    alone_every: int = 0
    """After so many evaluations steps without communication are timed; 0: never."""


class Alone:
    """Another model of the workload, which trains without communication while the clock stands still: what a step would take
    if nothing were sent, on the machine as it is at the time (beside a peer's threads, where it has such between steps)."""

    def __init__(self, workload: Workload, seed: int) -> None:
        training_batches, _ = training_of(workload)
        self._batches = iter(training_batches(dist.get_rank(), dist.get_world_size(), seed))
        self._loss = workload.loss
        with torch.random.fork_rng():
            model = workload.build_model()
            self._joined = join(BASELINE, model, workload.build_optimizer(model))
            self._take(2)  # the first ones make what the optimizer remembers

    def seconds_per_step(self) -> float:
        """Over ``_STEPS_ALONE`` of them from barrier to barrier, with caches as they are after a pause: a run's steps find them
        so, too. Collective."""
        with torch.random.fork_rng():
            dist.barrier()
            begin = time.perf_counter()
            self._take(_STEPS_ALONE)
            dist.barrier()
            return (time.perf_counter() - begin) / _STEPS_ALONE

    def _take(self, steps: int) -> None:
        for _ in range(steps):
            batch = next(self._batches, None)
            if batch is None:
                raise ConfigurationError(
                    "training_batches() has ended, but steps without communication go on: let it be endless"
                )
            self._joined.step(*batch, self._loss)


_STEPS_ALONE = 25


class Clock:
    """Seconds of training: it runs until all ranks have come to a pause, and goes on when all leave it."""

    def __init__(self, replica: Replica | None) -> None:
        self._replica, self._paused = replica, 0.0
        dist.barrier()
        self._begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """So far."""
        return time.perf_counter() - self._begin - self._paused

    @contextmanager
    def pause(self) -> Iterator[float]:
        """Inside, the clock stands still, at the seconds given: the first rank's, so that all decide alike. Collective."""
        if self._replica is not None:
            self._replica.catch_up()
        dist.barrier()
        stopped = time.perf_counter()
        yield of_all(stopped - self._begin - self._paused)[0]
        dist.barrier()
        self._paused += time.perf_counter() - stopped


def train(workload: Workload, method: str, seed: int, goal: Goal) -> None:
    """Train from ``seed`` until the goal is reached. Raises ConfigurationError if the workload has no data or quality."""
    training_batches, quality = training_of(workload)
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = workload.build_model()
    made = join(parse_method(method), model, workload.build_optimizer(model))
    apart = method in PEERS and PEERS[method].period > 1
    alone = Alone(workload, seed) if goal.alone_every else None
    _say({"method": method, "parameters": sum(p.numel() for p in model.parameters()), "torch": torch.__version__})
    source = iter(training_batches(rank, world, seed))
    batches = chain([next(source)], source)  # the data are there when the clock begins
    with made.turn():
        _train(workload, made, batches, goal, lambda: evaluate(quality, model, made.replica, apart), alone)
    made.close()


def _train(
    workload: Workload,
    made: Joined,
    batches: Batches,
    goal: Goal,
    quality: Callable[[], tuple[str, float]],
    alone: Alone | None,
) -> None:
    """Take the steps, telling of them and of what ``quality`` says, until the goal is reached."""
    points: list[tuple[float, float]] = []
    clock, told = Clock(made.replica), 0.0
    for step, (inputs, targets) in enumerate(batches, 1):
        made.step(inputs, targets, workload.loss)
        if clock.seconds - told >= _TELL_EVERY:
            told = clock.seconds
            _say({"at": step, "seconds": told})
        if step % goal.eval_every == 0:
            with clock.pause() as seconds:
                measure, value = quality()
                points.append((seconds, value))
                _say({"step": step, "seconds": seconds, "measure": measure, "quality": value})
                if alone is not None and len(points) % goal.alone_every == 0:
                    _say({"alone": alone.seconds_per_step()})
            if seconds >= goal.seconds or (goal.until is not None and crossing(points, goal.until, measure) is not None):
                break


def evaluate(quality: Quality, model: nn.Module, replica: Replica | None, apart: bool) -> tuple[str, float]:
    """What is measured, and its value for the mean of the workers' models. Collective; the first rank evaluates.

    ``apart``: the models differ although there is no replica that knows of it.
    """
    found: dict[str, float] = {}
    with replica.consensus() if replica is not None else _mean(model) if apart else nullcontext():
        if dist.get_rank() == 0:
            found = quality(model)
    # What all ranks decide by is the same on all, to the last bit.
    return next(iter(of_all(found)[0].items()))


@contextmanager
def _mean(model: nn.Module) -> Iterator[None]:
    """Inside, the model is the mean over all ranks, with its running statistics, as a replica's ``consensus()`` makes it."""
    tensors = [tensor.detach() for tensor in (*model.parameters(), *floating(named_buffers(model)).values())]
    own = [tensor.clone() for tensor in tensors]
    try:
        for tensor in tensors:
            dist.all_reduce(tensor.div_(dist.get_world_size()))
        yield
    finally:
        for tensor, before in zip(tensors, own, strict=True):
            tensor.copy_(before)


def _say(record: dict[str, Any]) -> None:
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(record) + "\n")
        sys.stdout.flush()


def main() -> None:
    """Train as the options say."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a Python file with training_batches() and quality()")
    parser.add_argument("--method", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--seconds", type=float, default=600.0, help="of training, after which the run ends")
    parser.add_argument("--until", type=float, help="the quality at which the run ends")
    parser.add_argument(
        "--alone-every", type=int, default=0, metavar="EVALUATIONS", help="after which steps without communication are timed"
    )
    options = parser.parse_args()
    dist.init_process_group("gloo")
    goal = Goal(options.seconds, options.until, options.eval_every, options.alone_every)
    train(find_workload(options.workload), options.method, options.seed, goal)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
