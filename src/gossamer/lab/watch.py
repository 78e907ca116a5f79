"""Watch: the supervisor's loop over the ranks' output, their ends, and the launcher's wishes."""

from __future__ import annotations

import os
import selectors
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gossamer.lab.breaking import Breaker
from gossamer.lab.lines import LineSplitter
from gossamer.lab.processes import RankProcess, pace
from gossamer.lab.spec import LabSpec

TIMED_OUT = 124  # as timeout(1)

# After a failure the other ranks may print what they make of it; after a signal they may clean up.
_LAST_WORDS_S = 2.0
_GRACE_S = 3.0

_LONGEST_WAIT_S = 3600.0

# Reads that surely empty a pipe; more would be for a daemon that goes on writing.
_LEFT_READS = 32


@dataclass(frozen=True)
class _Pipe:
    rank: RankProcess
    stream: str
    lines: LineSplitter


class Watch:
    """Runs until every rank has ended, and reports how it went.

    Stages: running; last words (a rank failed, the others go on for a moment); ending (a signal was sent, and
    SIGKILL comes next). Each but the first has a deadline.
    """

    def __init__(
        self,
        spec: LabSpec,
        ranks: list[RankProcess],
        report: Callable[..., None],
        breaker: Breaker,
        start: Callable[[int], RankProcess],
    ) -> None:
        """`start` starts a rank anew, for the faults after which that is due."""
        self._ranks, self._breaker, self._start = ranks, breaker, start
        self._report = report
        self._stage = "running"
        self._deadline = None if spec.timeout is None else time.monotonic() + spec.timeout
        self._stopped_with: int | None = None
        self._failed: RankProcess | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(0, selectors.EVENT_READ, None)
        self._wakeup = _wake_for_children()
        self._selector.register(self._wakeup, selectors.EVENT_READ, None)
        for rank in ranks:
            self._listen(rank)
        stopped = spec.slow.items() if spec.slow_by == "stopping" else ()
        self._pacers = [pace(self._groups(host), factor) for host, factor in stopped if factor > 1]

    def _listen(self, rank: RankProcess) -> None:
        for stream, fd in rank.streams():
            self._selector.register(fd, selectors.EVENT_READ, _Pipe(rank, stream, LineSplitter()))

    def run(self) -> None:
        """Watch until all ranks have ended; the last event reported is the outcome."""
        self._breaker.begin(time.monotonic())
        self._reap()  # processes that ended before we listened
        while any(rank.exit_code is None for rank in self._ranks):
            # No longer than selectors can wait; the deadline is looked at after every wait.
            for key, _ in self._selector.select(self._longest_wait()):
                self._readable(key.fd, key.data)
            if self._stage == "running":
                self._breaker.carry_out(time.monotonic())
            self._reap()
            self._end_what_is_stopped()
            if self._deadline is not None and time.monotonic() >= self._deadline:
                self._overdue()
        self._drain()
        self._choose_failed()
        self._report("end", self._outcome())

    def _longest_wait(self) -> float | None:
        now = time.monotonic()
        limits = [] if self._deadline is None else [max(0.0, self._deadline - now)]
        fault = self._breaker.seconds_left(now) if self._stage == "running" else None
        limits += [] if fault is None else [fault]
        return min([_LONGEST_WAIT_S, *limits]) if limits else None

    def _readable(self, fd: int, pipe: _Pipe | None) -> bool:
        """Take in what is there to read from one of the file descriptors; whether there was anything."""
        try:
            data = os.read(fd, 1 << 16)
        except BlockingIOError:
            return False
        if fd == 0:
            self._wish(data)
        elif pipe is not None:
            for line in pipe.lines.feed(data) if data else pipe.lines.flush():
                self._line(pipe, line)
            if not data:
                self._selector.unregister(fd)
        return bool(data)

    def _line(self, pipe: _Pipe, line: str) -> None:
        if pipe.stream == "stderr":
            pipe.rank.tail.add(line, time.monotonic())
        self._breaker.saw(line, time.monotonic())
        self._report("line", pipe.rank.rank, pipe.stream, line)

    def _wish(self, data: bytes) -> None:
        """The launcher sends signal numbers; when it closes its end it is gone, and so are we."""
        if not data:
            self._end(signal.SIGKILL)
            self._selector.unregister(0)
            return
        self._stopped_with = self._stopped_with or data[0]
        self._end(data[0])

    def _reap(self) -> None:
        """Collect children that have ended; in a PID namespace these include orphans that are not ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid in self._pacers:  # its host's ranks have ended
                self._pacers.remove(pid)
            for rank in list(self._ranks):
                if rank.pid == pid and rank.exit_code is None:
                    rank.ended(status, time.monotonic())
                    self._failure(rank)

    def _failure(self, rank: RankProcess) -> None:
        if self._stage == "running" and rank.restarts:
            self._ranks[rank.rank] = again = self._start(rank.rank)
            self._listen(again)
        elif rank.exit_code and self._stage == "running" and not self._breaker.planned:
            self._stage = "last words"
            self._deadline = time.monotonic() + _LAST_WORDS_S

    def _end_what_is_stopped(self) -> None:
        """Where all other ranks have ended: the ranks that a fault has stopped for ever."""
        left = [rank for rank in self._ranks if rank.exit_code is None]
        if self._stage == "running" and left and all(rank.broken for rank in left):
            self._end(signal.SIGKILL)

    def _overdue(self) -> None:
        if self._stage == "running":
            self._stopped_with = 0
        self._end(signal.SIGKILL if self._stage == "ending" else signal.SIGTERM)

    def _end(self, number: int) -> None:
        """Send a signal to every rank that still runs; SIGKILL follows."""
        self._choose_failed()
        self._stage = "ending"
        self._deadline = time.monotonic() + _GRACE_S
        for pacer in self._pacers:
            os.kill(pacer, signal.SIGKILL)
            os.waitpid(pacer, 0)  # so that it cannot stop a rank once more
        self._pacers = []
        for rank in self._ranks:
            if rank.exit_code is None:
                rank.send(number)
                rank.send(signal.SIGCONT)

    def _choose_failed(self) -> None:
        """The first failure so far; one that comes after we have begun to end ranks is our doing."""
        survived = self._stage == "running" and self._breaker.planned and self._stopped_with is None
        if survived or self._stage == "last words":
            failed = [rank for rank in self._ranks if rank.failed_at is not None and not rank.broken]
            self._failed = min(failed, key=lambda rank: rank.failed_at or 0.0, default=None)

    def _drain(self) -> None:
        """Read what ended ranks have left in their pipes; a pipe which a daemon still holds does not end."""
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                for _ in range(_LEFT_READS):
                    if not self._readable(key.fd, key.data):
                        break
                for line in key.data.lines.flush():
                    self._line(key.data, line)

    def _outcome(self) -> dict[str, Any]:
        if self._failed is not None:
            rank = self._failed
            return {
                "exit_code": rank.exit_code, "failed_rank": rank.rank, "failed_host": rank.host,
                "traceback": rank.tail.traceback(), "timed_out": False,
            }  # fmt: skip
        code = 0 if self._stopped_with is None else 128 + self._stopped_with if self._stopped_with else TIMED_OUT
        return {
            "exit_code": code, "failed_rank": None, "failed_host": None,
            "traceback": "", "timed_out": self._stopped_with == 0,
        }  # fmt: skip

    def _groups(self, host: int) -> list[int]:
        return [rank.pid for rank in self._ranks if rank.host == host]


def _wake_for_children() -> int:
    """A file descriptor that becomes readable when a child has ended."""
    reader, writer = os.pipe()
    for fd in (reader, writer):
        os.set_blocking(fd, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reader
