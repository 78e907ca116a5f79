"""Trained: one method of a comparison in training: its step, and what is known of it beforehand."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from gossamer.bench.bound import When
from gossamer.bench.methods import Method, algorithm_of, join, overlaps_forward, parse_method
from gossamer.bench.peers import PEERS, Joined
from gossamer.bench.workload import Workload
from gossamer.errors import GossamerError
from gossamer.optim import OneBitAdam

LONGEST = 16
"""Steps to which all methods of a run are timed for the sake of one whose traffic repeats itself so seldom."""

MODEL_SEED = 0
"""Every method begins with the same weights. Batches are drawn by a generator whose seed is the rank."""


@dataclass(frozen=True, slots=True)
class Trained:
    """One method: its training step, and what takes it.

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
        """Which phase this step is in, of a method whose exchange is another one later on. Of an optimizer: now."""
        optimizer = self.joined.optimizer
        return isinstance(optimizer, OneBitAdam) and optimizer.frozen, sum(each <= step for each in self.changes)

    def timed(self, steps: int) -> int:
        """How many steps of a round are timed: at least ``steps``."""
        return -(-steps // self.period) * self.period


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps of a method in its turn: the first ones, which are not counted, and the timed ones."""

    lead_in: int
    timed_steps: int

    @property
    def taken(self) -> int:
        """All of them."""
        return self.lead_in + self.timed_steps

    def of(self, method: Trained) -> "Pace":
        """That of one method: both rounded up to multiples of its period, so that each of its turns begins alike."""
        return Pace(method.timed(self.lead_in), method.timed(self.timed_steps))


def pace(methods: Iterable[Trained], steps: int) -> Pace:
    """The same for all methods of a run, as far as their periods allow; at least ``steps`` timed.

    A method whose traffic repeats itself every 8 steps can only be timed over multiples of 8, after as many. If another beside
    it were timed over 5 steps after 1, the two would differ in what is no property of theirs: how warm caches are, how full
    the token buckets, and over how many steps the barriers at both ends of a turn are spread. So the longest period, up to
    ``LONGEST``, is led in and timed by all.
    """
    longest = max(min(method.period, LONGEST) for method in methods)
    return Pace(longest, max(steps, longest))


class MethodError(GossamerError):
    """A method could not be made, or did not take its first steps."""

    def __init__(self, method: str, error: Exception) -> None:
        kind = "" if isinstance(error, GossamerError) else f"{type(error).__name__}: "
        super().__init__(f"{method}: {kind}{error}")
        self.method = method


@contextmanager
def named(method: str) -> Iterator[None]:
    """Whatever fails inside is a :class:`MethodError`: the error itself need not tell whose it is."""
    try:
        yield
    except Exception as error:
        raise MethodError(method, error) from error


def make_method(workload: Workload, method: str, rank: int) -> Trained:
    """A fresh model that communicates as ``method`` says."""
    torch.manual_seed(MODEL_SEED)
    model, generator = workload.build_model(), torch.Generator().manual_seed(rank)
    parsed = parse_method(method)
    nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    made = join(parsed, model, workload.build_optimizer(model))

    def step() -> None:
        made.step(*workload.random_batch(generator), workload.loss)

    algorithm = algorithm_of(parsed)
    changes = frozenset[int]() if algorithm is None else algorithm.cadence.changes
    return Trained(step, made, exchanged(parsed), _payload(parsed, nbytes), _period(parsed), changes)


def exchanged(method: Method) -> When:
    """When the exchange of a method may travel.

    Of an optimizer that communicates: from the gradients' readiness on, although it begins in its step; a bound may be
    lower than what can be reached, and must not be higher.
    """
    if isinstance(method, str):
        return PEERS[method].when
    algorithm = algorithm_of(method)
    if overlaps_forward(method):
        return "layered"
    if algorithm is not None and algorithm.part("gradients") is None:
        return "overlapped"
    return "joined"


def _payload(method: Method, nbytes: int) -> float | None:
    """Bytes that a peer sends per step and rank, with gradients of ``nbytes``; None if unknown, and for gossamer's, counted."""
    if not isinstance(method, str) or PEERS[method].payload is None:
        return None
    world = dist.get_world_size()
    return 2 * (world - 1) / world * nbytes * (PEERS[method].payload or 0.0)


def _period(method: Method) -> int:
    if isinstance(method, str):
        return PEERS[method].period
    algorithm = algorithm_of(method)
    if algorithm is None:
        return 1
    # One that may lag is waited for only so many steps later: over fewer, it would be waited for in others' turns.
    return algorithm.cadence.period * (1 + algorithm.cadence.lag)
