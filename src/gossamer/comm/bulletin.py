"""Bulletin: what ranks tell each other beside the exchanges: arrivals, alarms, departures, who waits for what.

It lives in the key-value store that the process group was made with, and is read only by a rank that has already
waited for a second, so it costs nothing while all goes well.
"""

import logging
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

from gossamer.errors import CommunicationError, CommunicationTimeout, PeerLeftError

logger = logging.getLogger("gossamer")

WARN_AFTER = 10.0
"""Seconds after which a late peer is named in a warning."""


def names(ranks: Iterable[int]) -> str:
    """``rank 2``, or ``ranks 1, 2``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


class Bulletin:
    """One board per replica; ``store`` is anything with the set, get, check and add of ``torch.distributed.Store``."""

    def __init__(self, store: Any, rank: int, world: int, prefix: str) -> None:
        self._store, self._rank, self._world, self._prefix = store, rank, world, prefix

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"gossamer/{self._prefix}/{name}" + ("" if rank is None else f"/{rank}")

    def _has(self, name: str, rank: int | None = None) -> bool:
        return bool(self._store.check([self._key(name, rank)]))

    def _read(self, name: str, rank: int | None = None) -> str:
        text: bytes = self._store.get(self._key(name, rank))
        return text.decode(errors="replace")

    def _others(self) -> list[int]:
        return [rank for rank in range(self._world) if rank != self._rank]

    def alarm(self, message: str) -> None:
        """Post this rank's failure. The first one posted is the one that others report."""
        try:
            self._store.set(self._key("answer", self._rank), "alarm")
            if self._store.add(self._key("alarms"), 1) == 1:
                self._store.set(self._key("alarm"), message)
        except Exception as error:
            logger.debug("could not post an alarm: %s", error)

    def leave(self, sequence: int) -> None:
        """Post that this rank takes no part in flows from ``sequence`` on."""
        try:
            self._store.set(self._key("left", self._rank), str(sequence))
            self._store.set(self._key("departures"), "1")
        except Exception as error:
            logger.debug("could not post a departure: %s", error)

    def check(self, sequence: int, waiting_for: str) -> None:
        """Raise if a rank has failed, or has left before flow ``sequence``."""
        if self._has("alarm"):
            self._store.set(self._key("answer", self._rank), "heard")
            raise CommunicationError(f"rank {self._rank} gave up {waiting_for}: {self._read('alarm')}")
        if not self._has("departures"):
            return
        gone = [r for r in self._others() if self._has("left", r) and int(self._read("left", r)) <= sequence]
        if gone:
            raise PeerLeftError(
                f"rank {self._rank} waits in {waiting_for}, but {names(gone)} ended their training (replica closed, or "
                "process ended). If the data of some ranks end earlier, train inside `with replica.join():`."
            )

    def late(self, sequence: int) -> list[int]:
        """Post that this rank waits in flow ``sequence``; after a moment, the ranks that do not."""
        self._store.set(self._key("waits", self._rank), str(sequence))
        time.sleep(0.3)
        return [r for r in self._others() if not self._has("waits", r) or int(self._read("waits", r)) < sequence]

    def roll_call(self, patience: float = 3.0) -> list[int]:
        """After a lost connection: the ranks that give no answer within ``patience`` seconds."""
        self._store.set(self._key("answer", self._rank), "here")
        end = time.monotonic() + patience
        missing = self._others()
        while missing and time.monotonic() < end:
            time.sleep(0.1)
            missing = [rank for rank in missing if not self._has("answer", rank)]
        return missing

    def arrive(self, timeout: float, what: str) -> None:
        """Wait until every rank is here; say after ten seconds who is not."""
        self._store.set(self._key("arrived", self._rank), "1")
        self._store.add(self._key("arrivals"), 1)
        self.poll(lambda: self._store.add(self._key("arrivals"), 0) >= self._world, timeout, what)

    def poll(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        """Ask ``ready`` until it holds; raises an alarm of another rank, or the timeout."""
        begin, pause, warned = time.monotonic(), 0.001, False
        while not ready():
            waited = time.monotonic() - begin
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            if self._has("alarm"):
                self.check(0, what)
            if waited > timeout:
                raise CommunicationTimeout(f"rank {self._rank}: {what}: {self._absent()} not there after {timeout:g} s")
            if waited > WARN_AFTER and not warned:
                warned = True
                logger.warning("rank %d has waited %.0f s: %s: %s not there", self._rank, waited, what, self._absent())

    def _absent(self) -> str:
        return names(rank for rank in self._others() if not self._has("arrived", rank))


def default_timeout(seconds: float | timedelta | None, group_timeout: timedelta) -> float:
    """Seconds that an exchange may take: what the user gave, or the process group's own timeout."""
    if seconds is None:
        return group_timeout.total_seconds()
    return seconds.total_seconds() if isinstance(seconds, timedelta) else float(seconds)
