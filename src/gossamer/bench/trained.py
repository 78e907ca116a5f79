"""Trained: one side of a comparison in training: its step, and what is known of it beforehand."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gossamer.bench.bound import When
from gossamer.bench.peers import PEERS, Joined
from gossamer.bench.sides import Side, algorithm_of, join, overlaps_forward, parse_side
from gossamer.bench.workload import Workload
from gossamer.errors import GossamerError
from gossamer.optim import OneBitAdam

LONGEST = 16
"""Steps to which all sides of a run are timed for the sake of one whose traffic repeats itself so seldom."""

MODEL_SEED = 0
"""Every side begins with the same weights. Batches are drawn by a generator whose seed is the rank."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One side: its training step, and what takes it.

    ``when``: its exchange may travel. ``payload_bytes``: what a step sends, known beforehand, where gossamer does not count
    it. ``period``: after how many steps what travels repeats itself; it is timed in
    multiples of that. ``changes``: steps at which another algorithm of a sequence begins.
    """

    step: Callable[[], None]
    joined: Joined
    when: When
    payload_bytes: float | None
    period: int
    changes: frozenset[int] = frozenset()

    def phase(self, step: int) -> tuple[bool, int]:
        """Which phase this step is in, of a side whose exchange is another one later on. Of an optimizer: now."""
        optimizer = self.joined.optimizer
        return isinstance(optimizer, OneBitAdam) and optimizer.frozen, sum(each <= step for each in self.changes)

    def timed(self, steps: int) -> int:
        """How many steps of a round are timed: at least ``steps``."""
        return -(-steps // self.period) * self.period


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of a side in its turn: those that lead in and are not counted, and those that are timed."""

    lead_in: int
    timed_steps: int

    @property
    def taken(self) -> int:
        """All of them."""
        return self.lead_in + self.timed_steps

    def of(self, side: Trained) -> "Pace":
        """That of one side: both rounded up to multiples of its period, so that each of its turns begins alike."""
        return Pace(side.timed(self.lead_in), side.timed(self.timed_steps))


def pace(sides: Iterable[Trained], steps: int) -> Pace:
    """The same for all sides of a run, as far as their periods allow; at least ``steps`` timed.

    A side whose traffic repeats itself every 8 steps can only be timed over multiples of 8, after as many. If another beside
    it were timed over 5 steps after 1, the two would differ in what is no property of theirs: how warm caches are, how full
    the token buckets, and over how many steps the barriers at both ends of a turn are spread. So the longest period, up to
    ``LONGEST``, is led in and timed by all.
    """
    longest = max(min(side.period, LONGEST) for side in sides)
    return Pace(longest, max(steps, longest))


class SideError(GossamerError):
    """A side could not be made, or did not take its first steps."""

    def __init__(self, side: str, error: Exception) -> None:
        kind = "" if isinstance(error, GossamerError) else f"{type(error).__name__}: "
        super().__init__(f"{side}: {kind}{error}")
        self.side = side


@contextmanager
def named(side: str) -> Iterator[None]:
    """Whatever fails inside is a :class:`SideError`: the error itself need not tell whose it is."""
    try:
        yield
    except Exception as error:
        raise SideError(side, error) from error


def make_side(workload: Workload, side: str, rank: int) -> Trained:
    """A fresh model that communicates as ``side`` says."""
    torch.manual_seed(MODEL_SEED)
    model, generator = workload.build_model(), torch.Generator().manual_seed(rank)
    parsed = parse_side(side)
    nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    made = join(parsed, model, workload.build_optimizer(model))

    def step() -> None:
        made.step(*workload.random_batch(generator), workload.loss)

    algorithm = algorithm_of(parsed)
    changes = frozenset[int]() if algorithm is None else algorithm.changes
    return Trained(step, made, exchanged(parsed), _payload(parsed, nbytes), _period(parsed), changes)


def exchanged(side: Side) -> When:
    """When the exchange of a side may travel.

    Of an optimizer that communicates: from the gradients' readiness on, although it begins in its step; a bound may be
    lower than what can be reached, and must not be higher.
    """
    if isinstance(side, str):
        return PEERS[side].when
    algorithm = algorithm_of(side)
    if overlaps_forward(side):
        return "layered"
    if algorithm is not None and algorithm.part("gradients") is None:
        return "overlapped"
    return "joined"


def _payload(side: Side, nbytes: int) -> float | None:
    """Bytes that a peer sends per step and rank, with gradients of ``nbytes``; None if unknown, and for gossamer's, counted."""
    if not isinstance(side, str) or PEERS[side].payload is None:
        return None
    world = dist.get_world_size()
    return 2 * (world - 1) / world * nbytes * (PEERS[side].payload or 0.0)


def _period(side: Side) -> int:
    if isinstance(side, str):
        return PEERS[side].period
    algorithm = algorithm_of(side)
    if algorithm is None:
        return 1
    # One that may lag is waited for only so many steps later: over fewer, it would be waited for in others' turns.
    return algorithm.traffic_period * (1 + algorithm.may_lag)
