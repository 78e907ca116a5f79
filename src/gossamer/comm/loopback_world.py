"""Loopback world: the ranks of one process, of which one runs at a time, and where they wait for each other."""

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from torch import Tensor

from gossamer.comm.calls import differing, left_alone
from gossamer.comm.generators import Turns
from gossamer.comm.operations import carry_out
from gossamer.comm.ops import Group, Op
from gossamer.errors import CommunicationError, ConfigurationError, DisagreementError, GossamerError, UsageError

Place = tuple[int, Group, int]
"""Where ranks meet: a channel, those who take part, and the how-many-th operation among them it is."""


Call = tuple[int, str]
"""A call that all ranks make: the channel of its replica, and its name."""


@dataclass
class Gathering:
    """One call: who has made it."""

    calls: dict[int, Call] = field(default_factory=dict)
    answering: set[int] = field(default_factory=set)
    """The ranks that take part in an exchange for which others may wait meanwhile."""
    asked: set[int] = field(default_factory=set)
    """Those of them that are to do so now."""
    complete: bool = False


@dataclass
class Meeting:
    """One operation: what each rank brought, and in the end what each takes away."""

    channel: int
    group: Group
    brought: dict[int, Op] = field(default_factory=dict)
    labels: dict[int, str] = field(default_factory=dict)
    results: dict[int, Tensor] | None = None


class World:
    """The ranks of one loopback run, of which one runs at a time."""

    def __init__(self, size: int) -> None:
        if size < 1:
            raise ConfigurationError(f"a loopback world needs at least one rank; got {size}")
        self.size = size
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._turns = [threading.Condition(self._lock) for _ in range(size)]
        self._running = 0
        self._waits: dict[int, Meeting] = {}
        self._gathering = Gathering()
        self._gathered: dict[int, Gathering] = {}
        """The ranks that wait in a call until all have made it."""
        self._left: set[tuple[int, int]] = set()
        """Channels, and ranks that have left them."""
        self._finished: set[int] = set()
        self._meetings: dict[Place, Meeting] = {}
        self._channels = [0] * size
        self._generators = Turns(size)

    def open_channel(self, rank: int) -> int:
        """A number for a new runner, equal on all ranks that open runners in the same order."""
        self._channels[rank] += 1
        return self._channels[rank]

    def bring(self, rank: int, place: Place, op: Op, label: str) -> Meeting:
        """Start an operation; raises if another rank brought a different one to the same meeting."""
        meeting = self._meetings.setdefault(place, Meeting(*place[:2]))
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
        """The result for ``rank``; lets others run until every rank has come."""
        if meeting.results is None:
            self._waits[rank] = meeting
            self._generators.leave(rank)
            self._let_next_run(rank)
            self._waits.pop(rank, None)
        if meeting.results is None:
            raise self._alone(rank, meeting) or self._stopped(rank)
        return meeting.results[rank]

    def _alone(self, rank: int, meeting: Meeting) -> BaseException | None:
        """The error of a rank that waits for others which have left."""
        gone = [] if self.failure is not None else self._absent(meeting)
        return left_alone(rank, f"{meeting.brought[rank]} of {meeting.labels[rank]}", gone) if gone else None

    def _absent(self, meeting: Meeting) -> list[int]:
        """The ranks that will not come to an operation, because they have left its channel."""
        return [r for r in meeting.group if r not in meeting.brought and (meeting.channel, r) in self._left]

    def leave(self, rank: int, channel: int) -> None:
        """Take no part in a channel any more."""
        self._left.add((channel, rank))

    def meet(self, rank: int, call: Call, answer: Callable[[], bool] | None) -> None:
        """Wait until all ranks have made a call. One that others wait for in an exchange, so that nobody can go on, answers
        them; raises if others are in another call, or can come to none."""
        gathering = self._gathering
        self._gather(rank, gathering, call, answer is not None)
        while not gathering.complete:
            self._generators.leave(rank)
            self._let_next_run(rank)
            if gathering.complete:
                break
            if rank not in gathering.asked or self.failure is not None or answer is None:
                raise self._without(rank, gathering)
            gathering.asked.discard(rank)
            del gathering.calls[rank], self._gathered[rank]
            answer()
            self._gather(rank, gathering, call, True)
        self._gathered.pop(rank, None)

    def _gather(self, rank: int, gathering: Gathering, call: Call, answers: bool) -> None:
        others = {other: theirs for other, theirs in gathering.calls.items() if theirs != call}
        if others:
            raise differing(rank, call[1], {other: theirs[1] for other, theirs in others.items()})
        gathering.calls[rank], self._gathered[rank] = call, gathering
        if answers:
            gathering.answering.add(rank)
        if len(gathering.calls) == self.size:
            gathering.complete, self._gathering = True, Gathering()

    def _without(self, rank: int, gathering: Gathering) -> BaseException:
        """The error of a rank in a call to which others will not come."""
        gone = self._gone(gathering)
        del self._gathered[rank]
        if gone and self.failure is None:
            return left_alone(rank, gathering.calls[rank][1], gone)
        return self._stopped(rank)

    def _gone(self, gathering: Gathering) -> list[int]:
        """The ranks that will not make a call, because they have left its channel, or ended."""
        channel = next(iter(gathering.calls.values()))[0]
        missing = [rank for rank in range(self.size) if rank not in gathering.calls]
        return [rank for rank in missing if (channel, rank) in self._left or rank in self._finished]

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
        self._let_next_run(rank, wait=False)

    def stop(self, error: BaseException) -> None:
        """Wake every rank with an error."""
        with self._lock:
            self.failure = self.failure or error
            self._wake(range(self.size))

    def _runnable(self, rank: int) -> bool:
        if rank in self._finished:
            return False
        if rank in self._gathered:
            gathering = self._gathered[rank]
            return gathering.complete or rank in gathering.asked or bool(self._gone(gathering))
        meeting = self._waits.get(rank)
        return meeting is None or meeting.results is not None or bool(self._absent(meeting))

    def _wake(self, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._turns[rank].notify()

    def _let_next_run(self, rank: int, wait: bool = True) -> None:
        with self._lock:
            after = [(rank + k) % self.size for k in range(1, self.size + 1)]
            following = next((r for r in after if self._runnable(r)), None)
            if following is None and (missed := self._missed()):
                following = next(r for r in after if r in missed)
                self._gathered[following].asked.add(following)
            if following is None and len(self._finished) < self.size and self.failure is None:
                self.failure = self._deadlock()
            self._running = self._running if following is None else following
            self._wake(range(self.size) if self.failure is not None else [self._running])
            if wait:
                self._turns[rank].wait_for(lambda: self._running == rank or self.failure is not None)
        if wait:
            self._generators.enter(rank)

    def _missed(self) -> set[int]:
        """The ranks in a call that can answer others, which wait for them in an operation."""
        answering = {rank for rank, gathering in self._gathered.items() if rank in gathering.answering}
        return {r for meeting in self._waits.values() for r in meeting.group if r not in meeting.brought and r in answering}

    def _deadlock(self) -> GossamerError:
        waits = {r: f"{meeting.brought[r]} ({meeting.labels[r]})" for r, meeting in sorted(self._waits.items())}
        for rank, gathering in sorted(self._gathered.items()):
            return differing(rank, gathering.calls[rank][1], waits)
        waiting = "; ".join(f"rank {rank} waits in {where}" for rank, where in waits.items())
        ended = f"; ended: {sorted(self._finished)}" if self._finished else ""
        return DisagreementError(f"ranks wait for each other in vain: {waiting}{ended}")

    def _stopped(self, rank: int) -> BaseException:
        if isinstance(self.failure, DisagreementError | UsageError):
            return type(self.failure)(str(self.failure))
        return CommunicationError(f"rank {rank} gave up: another rank failed: {self.failure!r}")
