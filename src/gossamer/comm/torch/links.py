"""Links: the connections to each other rank, and what they tell of its process, its host and the network between."""

import hashlib
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from gossamer.comm.torch import sockets
from gossamer.comm.torch.sockets import Connection

SILENT_AFTER = 10.0
"""Seconds without an answer after which a host counts as vanished. Where nothing is sent, keep-alive probes ask for one."""

_QUEUED = 2**16
"""Bytes that wait for a rank from which on its connection counts as backed up."""


def described(own: Iterable[Connection], room: int) -> Tensor:
    """``int64[room]``: this rank's connections as others would recognise them, for :meth:`Links.found`."""
    marks = [_mark(*both) for connection in own if (both := sockets.ends(connection))][:room]
    return torch.tensor(marks + [0] * (room - len(marks)), dtype=torch.int64)


def _mark(near: str, far: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{near} {far}".encode()).digest()[:7], "big")


class Links:
    """Connections by rank. Connections that no rank has recognised as its own belong to none, and tell nothing."""

    def __init__(self, by_rank: Mapping[int, Sequence[Connection]] | None = None) -> None:
        self._by_rank = dict(by_rank or {})
        self._unanswered: dict[Connection, float] = {}
        """Since when a connection has been seen to wait for an answer."""
        self._acknowledged: dict[int, tuple[float, int]] = {}

    @staticmethod
    def found(own: Iterable[Connection], everyone: Tensor, rank: int) -> "Links":
        """The links of ``rank``, from what all ranks have described (``int64[world, room]``)."""
        owner = {mark: other for other, row in enumerate(everyone.tolist()) for mark in row if mark and other != rank}
        by_rank: dict[int, list[Connection]] = {}
        for connection in own:
            both = sockets.ends(connection)
            other = owner.get(_mark(both[1], both[0])) if both else None
            if other is not None:
                by_rank.setdefault(other, []).append(connection)
        return Links(by_rank)

    def __bool__(self) -> bool:
        """Whether any connection is known."""
        return bool(self._by_rank)

    def closed(self) -> list[int]:
        """The ranks that have closed a connection: their processes have ended, or given up."""
        return [rank for rank, links in self._by_rank.items() if not all(map(sockets.is_open, links))]

    def silent(self) -> dict[int, float]:
        """The ranks whose hosts have acknowledged nothing for :data:`SILENT_AFTER`, and for how many seconds.

        The kernel answers for a process that is busy or stopped, so that its host is not silent. To be asked about once a
        second: an answer between two looks counts.
        """
        now = time.monotonic()
        quiet = {rank: max((self._quiet(link, now) for link in links), default=0.0) for rank, links in self._by_rank.items()}
        if max(quiet.values(), default=0.0) < SILENT_AFTER:
            return {}
        return {rank: seconds for rank, seconds in quiet.items() if seconds >= SILENT_AFTER / 3}  # probes take turns

    def _quiet(self, link: Connection, now: float) -> float:
        """For how many seconds a connection has waited for an answer."""
        told = sockets.progress(link)
        if told is None or not told.unanswered:
            self._unanswered.pop(link, None)
            return 0.0
        since = self._unanswered.setdefault(link, now)
        if told.since_answer < now - since:  # an answer came, and something else waits now
            since = self._unanswered[link] = now
        return now - since

    def backed_up(self) -> dict[int, float]:
        """The ranks for which bytes wait in this host, and bytes per second that they have acknowledged since the last look."""
        now, found = time.monotonic(), {}
        for rank, links in self._by_rank.items():
            told = [each for link in links if (each := sockets.progress(link))]
            came, queued = sum(each.acknowledged for each in told), sum(each.queued for each in told)
            before, had = self._acknowledged.get(rank, (now, came))
            self._acknowledged[rank] = now, came
            if queued >= _QUEUED and now > before:
                found[rank] = (came - had) / (now - before)
        return found


def slow_rank(backlogs: Mapping[int, Mapping[int, float]]) -> int | None:
    """The rank at one end of every link that is backed up (``{from: {to: bytes/s}}``), if there is just one such rank."""
    pairs = [{source, to} for source, row in backlogs.items() for to in row]
    counts = Counter(rank for pair in pairs for rank in pair)
    common = [rank for rank, count in counts.items() if count == len(pairs)]
    return common[0] if len(common) == 1 else None
