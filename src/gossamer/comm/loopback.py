"""Loopback: N ranks inside one process, without a network.

One thread per rank, exactly one of them running at a time. The baton is passed only where a rank waits for others, and
the state of the random number generators travels with it, so a run is deterministic and each rank draws the numbers
it would draw in a process of its own. Ranks that disagree raise at once; ranks that wait for each other in vain, too.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.comm import ops
from gossamer.comm.generators import Generators, Turns
from gossamer.comm.ops import Decide, Flow, Group, Op
from gossamer.comm.runner import InlineRunner, Meter, Ticket
from gossamer.errors import CommunicationError, ConfigurationError, DisagreementError

T = TypeVar("T")

_here = threading.local()


Place = tuple[int, Group, int]
"""Where ranks meet: a channel, those who take part, and the how-many-th operation among them it is."""


@dataclass
class Meeting:
    """One operation: what each rank brought, and in the end what each takes away."""

    group: Group
    brought: dict[int, Op] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None


class World:
    """The ranks of one loopback run, and the baton between them."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigurationError(f"a loopback world needs at least one rank; got {size}")
        self.size = size
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._turns = [threading.Condition(self._lock) for _ in range(size)]
        self._running = 0
        self._waits: dict[int, Meeting] = {}
        self._here: dict[int, bool] = {}
        """The ranks that wait until all are here, and whether each is asked to answer another one."""
        self._finished: set[int] = set()
        self._meetings: dict[Place, Meeting] = {}
        self._channels = [0] * size
        self._generators = Turns(size)
        self._left = 0
        """How many have left the place where all were."""

    def open_channel(self, rank: int) -> int:
        """A number for a new runner, equal on all ranks that open runners in the same order."""
        self._channels[rank] += 1
        return self._channels[rank]

    def bring(self, rank: int, place: Place, op: Op, label: str) -> Meeting:
        """Start an operation; raises if another rank brought a different one to the same meeting."""
        meeting = self._meetings.setdefault(place, Meeting(place[1]))
        for other, theirs in islice(meeting.brought.items(), 1):  # those already here agree with each other
            if str(theirs) != str(op):
                raise DisagreementError(
                    f"operation {place[2]} differs between ranks: rank {other} yielded {theirs} ({meeting.labels[other]}), "
                    f"rank {rank} yielded {op} ({label})"
                )
        meeting.brought[rank], meeting.labels[rank] = op, label
        if len(meeting.brought) == len(meeting.group):
            results = carry_out([meeting.brought[r] for r in meeting.group])
            meeting.results = dict(zip(meeting.group, results, strict=True))
            del self._meetings[place]
        return meeting

    def take(self, rank: int, meeting: Meeting) -> Tensor:
        """The result for ``rank``; passes the baton until every rank has come."""
        if meeting.results is None:
            self._waits[rank] = meeting
            self._generators.leave(rank)
            self._pass_baton(rank)
            self._waits.pop(rank, None)
        if meeting.results is None:
            raise self._stopped(rank)
        return meeting.results[rank]

    def meet(self, rank: int, answer: Callable[[], bool]) -> None:
        """Wait until all ranks are here. One that others wait for in an exchange, so that nobody can go on, answers them."""
        self._here[rank] = False
        while len(self._here) < self.size:
            self._generators.leave(rank)
            self._pass_baton(rank)
            if len(self._here) == self.size:
                break
            if not self._here[rank] or self.failure is not None:
                raise self._stopped(rank)
            del self._here[rank]
            answer()
            self._here[rank] = False
        self._left += 1
        if self._left == self.size:
            self._here, self._left = {}, 0

    def enter(self, rank: int) -> None:
        """Wait for the first turn."""
        with self._lock:
            self._turns[rank].wait_for(lambda: self._running == rank or self.failure is not None)
        self._generators.enter(rank)

    def finish(self, rank: int, error: BaseException | None) -> None:
        """End this rank's turn for good."""
        with self._lock:
            if error is not None and self.failure is None:
                self.failure = error
            self._finished.add(rank)
        self._generators.end()
        self._pass_baton(rank, wait=False)

    def stop(self, error: BaseException) -> None:
        """Wake every rank with an error."""
        with self._lock:
            self.failure = self.failure or error
            self._wake(range(self.size))

    def _runnable(self, rank: int) -> bool:
        if rank in self._finished:
            return False
        if rank in self._here:
            return len(self._here) == self.size or self._here[rank]
        return rank not in self._waits or self._waits[rank].results is not None

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._turns[rank].notify()

    def _pass_baton(self, rank: int, wait: bool = True) -> None:
        with self._lock:
            after = [(rank + k) % self.size for k in range(1, self.size + 1)]
            following = next((r for r in after if self._runnable(r)), None)
            if following is None and (missed := self._missed()):
                following = next(r for r in after if r in missed)
                self._here[following] = True
            if following is None and len(self._finished) < self.size and self.failure is None:
                self.failure = DisagreementError(self._deadlock())
            self._running = self._running if following is None else following
            self._wake(range(self.size) if self.failure is not None else [self._running])
            if wait:
                self._turns[rank].wait_for(lambda: self._running == rank or self.failure is not None)
        if wait:
            self._generators.enter(rank)

    def _missed(self) -> set[int]:
        """The ranks that wait until all are here, while others wait for them in an operation."""
        return {r for meeting in self._waits.values() for r in meeting.group if r not in meeting.brought and r in self._here}

    def _deadlock(self) -> str:
        waiting = "; ".join(
            f"rank {rank} waits in {meeting.brought[rank]} ({meeting.labels[rank]})"
            for rank, meeting in sorted(self._waits.items())
        )
        if self._here:
            waiting += f"; until all ranks are here: {sorted(self._here)}"
        ended = f"; ended: {sorted(self._finished)}" if self._finished else ""
        return f"ranks wait for each other in vain: {waiting}{ended}"

    def _stopped(self, rank: int) -> BaseException:
        if isinstance(self.failure, DisagreementError):
            return type(self.failure)(str(self.failure))
        return CommunicationError(f"rank {rank} gave up: another rank failed: {self.failure!r}")


class LoopbackPort:
    """One runner's channel of one rank."""

    def __init__(self, world: World, rank: int, meter: Meter) -> None:
        self.label = ""
        self._world, self._rank, self._meter = world, rank, meter
        self._channel = world.open_channel(rank)
        self._everyone = tuple(range(world.size))
        self._counts: Counter[Group] = Counter()

    def start(self, op: Op, group: Group | None = None) -> Meeting:
        group = self._everyone if group is None else group
        self._meter.count(op, len(group), group.index(self._rank))
        self._counts[group] += 1
        return self._world.bring(self._rank, (self._channel, group, self._counts[group]), op, self.label)

    def wait(self, handle: Meeting) -> Tensor:
        return self._world.take(self._rank, handle)

    def decide(self, decision: Decide) -> Any:
        return decision.fn()


class LoopbackRunner(InlineRunner):
    """The runner of one rank of a loopback world."""

    def __init__(self, world: World, rank: int) -> None:
        meter = Meter()
        self._world = world
        self._loopback_port = LoopbackPort(world, rank, meter)
        super().__init__(self._loopback_port, meter, rank, world.size)

    def meet(self, label: str, answer: Callable[[], bool]) -> None:
        self._world.meet(self.rank, answer)
        super().meet(label, answer)  # all are here: what it sends elsewhere counts here, too

    def awaited(self, label: str) -> bool:
        return True

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        self._loopback_port.label = label
        return super().submit(make_flow, label, lane)


def current_runner() -> LoopbackRunner | None:
    """A new runner for the rank that this thread is, or None outside of a loopback run."""
    place = getattr(_here, "place", None)
    return None if place is None else LoopbackRunner(*place)


def loopback(fn: Callable[[int], T], world: int) -> list[T]:
    """Run ``fn(rank)`` for every rank of a world inside this process and return the results in order of rank.

    Inside ``fn``, :func:`gossamer.replicate` joins the loopback world: convergence of many workers on one machine,
    deterministic, without processes. Raises the first error that any rank raised.
    """
    ranks = World(world)
    results: list[Any] = [None] * world
    before, cores = Generators.now(), torch.get_num_threads()

    def body(rank: int) -> None:
        _here.place = (ranks, rank)
        torch.set_num_threads(cores)  # each thread has a setting of its own, and sums depend on it
        error: BaseException | None = None
        try:
            ranks.enter(rank)
            if ranks.failure is None:
                results[rank] = fn(rank)
        except BaseException as caught:
            error = caught
        ranks.finish(rank, error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)]
    _join(threads, ranks)
    before.put()
    if ranks.failure is not None:
        raise ranks.failure
    return results


def _join(threads: list[threading.Thread], world: World) -> None:
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except BaseException as error:
        world.stop(error)
        raise


def carry_out(brought: list[Op]) -> list[Tensor]:
    """What every rank receives when these operations (one per rank, of one kind) meet."""
    first, tensors = brought[0], [op.tensor for op in brought]
    if isinstance(first, ops.AllReduce):
        total = torch.stack(tensors).sum(0, dtype=first.tensor.dtype) if first.reduce == "sum" else torch.stack(tensors).amax(0)
        return [tensor.copy_(total) for tensor in tensors]
    if isinstance(first, ops.Broadcast):
        origin = tensors[first.source].clone()
        return [tensor.copy_(origin) for tensor in tensors]
    if isinstance(first, ops.Permute):
        return [tensors[first.permutation.source(rank)].clone() for rank in range(len(tensors))]
    if isinstance(first, ops.Push):
        sources = [first.graph.sources(rank) for rank in range(len(tensors))]
        nothing = first.tensor.new_empty((0, *first.tensor.shape))
        return [torch.stack([tensors[source] for source in each]) if each else nothing for each in sources]
    if isinstance(first, ops.AllToAll):
        return [torch.stack([tensor[rank] for tensor in tensors]) for rank in range(len(tensors))]
    if isinstance(first, ops.AllGather):
        return [torch.stack(tensors) for _ in tensors]
    raise TypeError(f"the loopback runner does not know {first}")
