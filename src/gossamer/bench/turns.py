"""Turns: methods take turns at the same training steps, each from barrier to barrier."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gossamer.bench.counters import Counters
from gossamer.bench.trained import Pace, Trained


@dataclass(frozen=True, slots=True)
class Round:
    """A few steps of one method: seconds per step, and what else they cost this rank."""

    seconds: float
    counted: Counters


def take_turns(
    methods: dict[str, Trained], rounds: int, common: Pace, told: Callable[[int], None] = lambda index: None
) -> dict[str, list[Round]]:
    """Every method's rounds: seconds per step, and what else the steps cost. ``told`` is called before every round.

    ``common``: how many steps are timed; see :func:`gossamer.bench.trained.pace`.
    """
    results: dict[str, list[Round]] = {name: [] for name in methods}
    names = list(methods)
    for index in range(rounds):
        told(index)
        turn = index // 2 % len(names)
        order = names[turn:] + names[:turn]
        for name in order if index % 2 == 0 else reversed(order):
            results[name].append(_time(methods[name], common.of(methods[name])))
    return results


def _time(method: Trained, own: Pace) -> Round:
    with method.joined.turn():
        for _ in range(own.lead_in):
            method.step()  # what the method before left in caches and token buckets is not this method's
        before = Counters.read(method.joined.replica)
        _meet(method)
        begin = time.perf_counter()
        for _ in range(own.timed_steps):
            method.step()
        _meet(method)
        seconds = (time.perf_counter() - begin) / own.timed_steps
        counted = Counters.read(method.joined.replica).per_step(before, own.timed_steps)
        _end_turn(method)
        return Round(seconds, counted)


def warm_up(method: Trained, steps: int) -> None:
    """Train at least so many steps."""
    with method.joined.turn():
        for _ in range(method.timed(steps)):
            method.step()
        _meet(method)
        _end_turn(method)


def _end_turn(method: Trained) -> None:
    """Leave nothing on the link, where it would delay another method, nor in memory that others need."""
    if method.joined.replica is not None:
        method.joined.replica.wait_for_exchanges()
    method.joined.model.zero_grad()
    _meet(method)


def _meet(method: Trained) -> None:
    if method.joined.replica is not None:
        method.joined.replica.catch_up()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()
