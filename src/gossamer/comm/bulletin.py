"""Bulletin: what ranks tell each other beside the exchanges: arrivals, alarms, departures, who waits for what.

It lives in the key-value store that the process group was made with, and is read only by a rank that has already
waited for a second, so it costs nothing while all goes well.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from gossamer.errors import CommunicationError, CommunicationTimeout, PeerLeftError

logger = logging.getLogger("gossamer")

WARN_AFTER = 10.0
"""Seconds after which a late peer is named in a warning."""

_EXIT = "gossamer/exit"


class StoreLostError(ConnectionError):
    """The host of the store has ended, or cannot be reached."""


class StoreSilentError(StoreLostError):
    """The host of the store does not answer, and may do so again."""


class Store(Protocol):
    """Where a bulletin lives."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> str:
        """Read a value that is there."""

    def values(self, keys: Sequence[str]) -> list[str]:
        """Read several values, empty where there is none."""

    def has(self, key: str) -> bool:
        """Whether there is a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""


def names(ranks: Iterable[int]) -> str:
    """``rank 2``, or ``ranks 1, 2``."""
    listed = sorted(ranks)
    return ("rank " if len(listed) == 1 else "ranks ") + ", ".join(map(str, listed))


def note_exit(store: Store, member: int, reason: str) -> bool:
    """Post that a process ends that never came to any board: those who wait for its arrival look here."""
    try:
        store.set(f"{_EXIT}/{member}", reason)
        store.set(_EXIT, "1")
    except Exception as error:
        logger.debug("could not post an exit: %s", error)
        return False
    return True


class Bulletin:
    """One board per replica. ``members`` are the global ranks, ``rank`` is this one's place among them."""

    def __init__(self, store: Store, members: Sequence[int], rank: int, prefix: str) -> None:
        self._store, self._members, self._rank, self._prefix = store, tuple(members), rank, prefix
        self._waiting: dict[int, tuple[int, str]] = {}
        """In which flows threads of this process wait."""

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"gossamer/{self._prefix}/{name}" + ("" if rank is None else f"/{rank}")

    def _has(self, name: str, rank: int | None = None) -> bool:
        return self._store.has(self._key(name, rank))

    def _read(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        """What these ranks have posted; empty where nothing is."""
        return dict(zip(ranks, self._store.values([self._key(name, rank) for rank in ranks]), strict=True))

    def _post(self, name: str, text: str) -> None:
        """Post under this rank's own key."""
        self._store.set(self._key(name, self._rank), text)

    def _tell(self, what: str, text: str = "1") -> None:
        """Post what every rank should notice when it next looks."""
        self._store.set(self._key(what), text)
        self._store.set(self._key("news"), "1")

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank != self._rank]

    def alarm(self, message: str) -> None:
        """Post this rank's failure. The first one posted is the one that others report."""
        try:
            self._post("answer", "alarm")
            if self._store.add(self._key("alarms"), 1) == 1:
                self._tell("alarm", message)
        except Exception as error:
            logger.debug("could not post an alarm: %s", error)

    def leave(self, sequence: int) -> None:
        """Post that this rank takes no part in flows from ``sequence`` on."""
        try:
            self._post("left", str(sequence))
            self._tell("departures")
        except Exception as error:
            logger.debug("could not post a departure: %s", error)

    def check(self, sequence: int, waiting_for: str) -> None:
        """Raise if a rank has failed, or has left before flow ``sequence``; answer a roll call."""
        if not self._has("news"):
            return
        if self._has("roll call"):
            self._post("answer", "here")
        gone = [rank for rank, left in self._read("left", self._others()).items() if left and int(left) <= sequence]
        if gone:
            raise PeerLeftError(
                f"rank {self._rank} waits in {waiting_for}, but {names(gone)} ended their training (replica closed, or "
                "process ended). If the data of some ranks end earlier, train inside `with replica.join():`."
            )
        if self._has("alarm"):
            self._post("answer", "heard")
            raise CommunicationError(f"rank {self._rank} gave up {waiting_for}: {self._store.get(self._key('alarm'))}")

    def wait_in(self, sequence: int | None, label: str = "") -> None:
        """Post in which flow this thread waits, by its number and what it is called, or with None that it goes on.

        Where several threads of a rank wait, it is for the earliest flow.
        """
        if sequence is None:
            self._waiting.pop(threading.get_ident(), None)
        else:
            self._waiting[threading.get_ident()] = (sequence, label)
        waiting = list(self._waiting.values())
        self._post("waits", "{} {}".format(*min(waiting)) if waiting else "")

    def late(self, sequence: int, label: str = "") -> list[int]:
        """The ranks that keep flow ``sequence`` waiting: those that wait for nobody, or else in the earliest flow."""
        self.wait_in(sequence, label)
        time.sleep(0.3)
        waits = self._waits()
        return [r for r, at in waits.items() if at is None] or [r for r, at in waits.items() if at and at[0] < sequence]

    def elsewhere(self, sequence: int, label: str) -> dict[int, str]:
        """The ranks that wait in another flow of the same number, and what that is called, where they have said it."""
        same_number = {rank: at[1] for rank, at in self._waits().items() if at and at[0] == sequence}
        return {rank: other for rank, other in same_number.items() if other and other != label}

    def _waits(self) -> dict[int, tuple[int, str] | None]:
        """Where the others wait."""
        posted = {rank: text.partition(" ") for rank, text in self._read("waits", self._others()).items()}
        return {rank: (int(number), label) if number else None for rank, (number, _, label) in posted.items()}

    def roll_call(self, patience: float = 3.0) -> list[int]:
        """After a lost connection: the ranks that give no answer within ``patience`` seconds."""
        self._post("answer", "here")
        self._tell("roll call")
        end = time.monotonic() + patience
        missing = self._others()
        while missing and time.monotonic() < end:
            time.sleep(0.1)
            missing = [rank for rank, answer in self._read("answer", missing).items() if not answer]
        for rank in missing:
            self._store.set(self._key("missing", rank), "1")
        return missing

    def heard_by_all(self) -> bool:
        """Whether every other rank has left, is missing, or has heard of an alarm: none needs this board any more."""
        left, answers = self._read("left", self._others()), self._read("answer", self._others())
        return all(left[rank] or answers[rank] in ("heard", "alarm") or self._has("missing", rank) for rank in self._others())

    def arrive(self, timeout: float, what: str) -> None:
        """Wait until every rank is here; say after ten seconds who is not."""
        for name in ("left", "answer", "waits"):
            self._post(name, "")  # what is there of all ranks can be read in one call
        self._post("arrived", "1")
        self._store.add(self._key("arrivals"), 1)
        self._poll(lambda: self._store.add(self._key("arrivals"), 0) >= len(self._members), timeout, what)

    def _poll(self, ready: Callable[[], bool], timeout: float, what: str) -> None:
        """Ask ``ready`` until it holds; raises the failure of another rank, or the timeout."""
        begin, pause, warned = time.monotonic(), 0.001, False
        while not ready():
            waited = time.monotonic() - begin
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            self.check(0, what)
            self._check_exits(what)
            if waited > timeout:
                raise CommunicationTimeout(f"rank {self._rank}: {what}: {names(self._absent())} not there after {timeout:g} s")
            if waited > WARN_AFTER and not warned:
                warned = True
                who = names(self._absent())
                logger.warning("rank %d has waited %.0f s: %s: %s not there", self._rank, waited, what, who)
        self.check(0, what)  # a rank that came may have given up since

    def _check_exits(self, what: str) -> None:
        """Raise if a process has ended without having come here."""
        if not self._store.has(_EXIT):
            return
        for rank in self._absent():
            if self._store.has(f"{_EXIT}/{self._members[rank]}"):
                reason = self._store.get(f"{_EXIT}/{self._members[rank]}")
                raise PeerLeftError(f"rank {self._rank}: {what}: rank {rank} will not come: {reason}")

    def _absent(self) -> list[int]:
        return [rank for rank in self._others() if not self._has("arrived", rank)]
