"""Failure board: what ranks tell each other beside the exchanges: arrivals, failures, ends, and who waits for what.

It lives in the key-value store that the process group was made with, and is read only by a rank that has already
waited for a second, so it costs nothing while all goes well.

Note [who may write]. Anybody who reaches the store's port can write there. So once the ranks have met, each message carries
a code (HMAC) of its key, which names its writer, and of its text, under a secret that the ranks have exchanged over their own
connections and never put into the store; what has no valid code is ignored. Before that, and against somebody who alters
the store while connections are made, or who reads the network between the ranks, there is no protection; nor against one who
deletes or overwrites messages, which takes away names and not the errors: connections and timeouts say that by themselves.
"""

import hashlib
import hmac
import logging
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from gossamer.comm.calls import left_alone, names
from gossamer.comm.torch.attempts import attempt, exit_key
from gossamer.comm.torch.store import Store, StoreSilentError
from gossamer.errors import CommunicationError, CommunicationTimeout, PeerLeftError

_logger = logging.getLogger("gossamer")

WARN_AFTER = 10.0
"""Seconds after which a late peer is named in a warning; and again after twice as many, four times as many …"""


class FailureBoard:
    """One board per replica. ``members`` are the global ranks, ``rank`` is this one's place among them."""

    def __init__(self, store: Store, members: Sequence[int], rank: int, prefix: str) -> None:
        self._store, self._members, self._rank = store, tuple(members), rank
        self._prefix = f"gossamer/attempt-{attempt()}/{prefix}"
        self._secret: bytes | None = None
        self._forged = False
        self._waiting: dict[int, tuple[int, str]] = {}
        """In which flows threads of this process wait."""

    @property
    def rank(self) -> int:
        """This rank's place among the members."""
        return self._rank

    @property
    def world(self) -> int:
        """How many ranks share it."""
        return len(self._members)

    @property
    def waited(self) -> float:
        """Seconds for which the store's answers were waited for."""
        return float(getattr(self._store, "waited", 0.0))

    def seal(self, secret: bytes) -> None:
        """From now on messages carry a code under ``secret``, and messages without one are ignored."""
        self._secret = secret

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"{self._prefix}/{name}" + ("" if rank is None else f"/{rank}")

    def _has(self, name: str, rank: int | None = None) -> bool:
        return self._store.has(self._key(name, rank))

    def _code(self, key: str, text: str) -> str:
        return "" if self._secret is None else hmac.new(self._secret, f"{key}\n{text}".encode(), hashlib.sha256).hexdigest()

    def _read(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        """What these ranks have posted; empty where nothing is, or something that they have not written."""
        keys = [self._key(name, rank) for rank in ranks]
        found = zip(ranks, keys, self._store.values(keys), strict=True)
        return {rank: self._checked(key, value) for rank, key, value in found}

    def _checked(self, key: str, value: str) -> str:
        code, _, text = value.partition("|")
        if not text or self._secret is None or hmac.compare_digest(code.encode(), self._code(key, text).encode()):
            return text
        if not self._forged:
            self._forged = True
            _logger.warning("rank %d ignores %s in the key-value store: no rank of this run wrote it", self._rank, key)
        return ""

    def _post(self, name: str, text: str) -> None:
        """Post under this rank's own key."""
        key = self._key(name, self._rank)
        self._store.set(key, f"{self._code(key, text)}|{text}")

    def _tell(self, what: str = "news") -> None:
        """Have every rank look when it next waits."""
        self._store.set(self._key(what), "1")
        self._store.set(self._key("news"), "1")

    def _others(self) -> list[int]:
        return [rank for rank in range(len(self._members)) if rank != self._rank]

    def alarm(self, message: str) -> None:
        """Post this rank's failure. The first one posted is the one that others report."""
        try:
            self._post("answer", "alarm")
            self._post("alarm", f"{self._store.add(self._key('alarms'), 1)} {message}")
            self._tell()
        except Exception as error:
            _logger.debug("could not post an alarm: %s", error)

    def leave(self, sequence: int) -> None:
        """Post that this rank takes no part in flows from ``sequence`` on."""
        try:
            self._post("left", str(sequence))
            self._tell()
        except Exception as error:
            _logger.debug("could not post that this rank leaves: %s", error)

    def check(self, sequence: int, waiting_for: str) -> None:
        """Raise if a rank has failed, or has left before flow ``sequence``; answer a roll call."""
        if not self._has("news"):
            return
        if self._has("roll call"):
            self._post("answer", "here")
        gone = [rank for rank, left in self._read("left", self._others()).items() if left and int(left) <= sequence]
        if gone:
            raise left_alone(self._rank, waiting_for, gone)
        alarms = {rank: text for rank, text in self._read("alarm", self._others()).items() if text}
        if alarms:
            self._post("answer", "heard")
            writer = min(alarms, key=lambda rank: _number(alarms[rank]))
            reason = alarms[writer].partition(" ")[2]
            raise CommunicationError(f"rank {self._rank} gave up {waiting_for}: {reason} (reported by rank {writer})")

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
        """The ranks that keep flow ``sequence`` waiting: ranks that wait for nobody, or else in the earliest flow."""
        self.wait_in(sequence, label)
        time.sleep(0.3)
        waits = self.waits()
        return [r for r, at in waits.items() if at is None] or [r for r, at in waits.items() if at and at[0] < sequence]

    def note_backlog(self, waiting: Mapping[int, float]) -> None:
        """Post for which ranks bytes wait in this host, and how many of them go out per second."""
        self._post("backlog", " ".join(f"{rank}:{rate:.0f}" for rank, rate in waiting.items()))

    def backlogs(self) -> dict[int, dict[int, float]]:
        """The same of the other ranks, as far as they have posted it."""
        posted = {rank: text.split() for rank, text in self._read("backlog", self._others()).items() if text}
        pairs = {rank: [pair.partition(":") for pair in row] for rank, row in posted.items()}
        return {rank: {int(to): float(rate) for to, _, rate in row} for rank, row in pairs.items()}

    def elsewhere(self, sequence: int, label: str, or_later: bool = False) -> dict[int, str]:
        """The ranks that wait in another flow of the same number (``or_later``: or a greater one), and what that is called,
        where they have said it."""
        at_number = {
            rank: at[1] for rank, at in self.waits().items() if at and (at[0] >= sequence if or_later else at[0] == sequence)
        }
        return {rank: other for rank, other in at_number.items() if other and other != label}

    def call(self, number: int, call: str) -> None:
        """Post that this rank has made a call that all make, its ``number``-th one (from 1)."""
        self._post("call", f"{number} {call}")

    def calls(self) -> dict[int, tuple[int, str]]:
        """The last call of each other rank, with its number; 0 where there was none."""
        posted = {rank: text.partition(" ") for rank, text in self._read("call", self._others()).items()}
        return {rank: (int(number or 0), call) for rank, (number, _, call) in posted.items()}

    def waits(self) -> dict[int, tuple[int, str] | None]:
        """Where the others wait."""
        posted = {rank: text.partition(" ") for rank, text in self._read("waits", self._others()).items()}
        return {rank: (int(number), label) if number else None for rank, (number, _, label) in posted.items()}

    def roll_call(self, seconds: float) -> list[int]:
        """After a lost connection that belongs to no known rank: the ranks that give no answer within so many seconds; fewer if
        all have answered."""
        self._post("answer", "here")
        self._tell("roll call")
        end = time.monotonic() + seconds
        missing = self._others()
        while missing and time.monotonic() < end:
            time.sleep(0.1)
            missing = [rank for rank, answer in self._read("answer", missing).items() if not answer]
        self.note_missing(missing)
        return missing

    def note_missing(self, ranks: Iterable[int]) -> None:
        """These have ended: nobody needs to wait until they have read what is here."""
        for rank in ranks:
            self._store.set(self._key("missing", rank), "1")

    def addresses(self) -> list[str]:
        """The addresses that the ranks have arrived with."""
        return [text for text in self._read("arrived", range(len(self._members))).values() if text]

    def heard_by_all(self) -> bool:
        """Whether every other rank has left, is missing, or has heard of an alarm: none needs this board any more."""
        left, answers = self._read("left", self._others()), self._read("answer", self._others())
        return all(left[rank] or answers[rank] in ("heard", "alarm") or self._has("missing", rank) for rank in self._others())

    def arrive(
        self, timeout: float, what: str, address: str = "", ended: Callable[[Sequence[int]], Collection[int]] = lambda ranks: ()
    ) -> None:
        """Wait until every rank is here; say again and again who is not. ``address``: of this host, for the others.

        ``ended`` tells which of the absent ranks can never come, because their processes have ended without a word.
        """
        for name in ("left", "answer", "waits", "alarm", "backlog", "call"):
            self._post(name, "")  # what is there of all ranks can be read in one call
        self._post("arrived", address or "somewhere")
        self._store.add(self._key("arrivals"), 1)
        self._poll(timeout, what, ended)

    def _all_are_here(self) -> bool:
        return self._store.add(self._key("arrivals"), 0) >= len(self._members)

    def _poll(self, timeout: float, what: str, ended: Callable[[Sequence[int]], Collection[int]]) -> None:
        """Ask until every rank is here; raises the failure of another rank, or the timeout."""
        begin, pause, warn_at, look_at = time.monotonic(), 0.001, WARN_AFTER, 1.0
        while not self._answers(self._all_are_here):
            waited = time.monotonic() - begin
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
            self._answers(lambda: self.check(0, what))
            self._answers(lambda: self._check_exits(what))
            if waited > timeout:
                raise CommunicationTimeout(f"rank {self._rank}: {what}: {self._not_there()} after {timeout:g} s")
            if waited > look_at:
                look_at += 1.0
                self._answers(lambda: self._check_processes(what, ended))
            if waited > warn_at:
                warn_at *= 2
                _logger.warning("rank %d has waited %.0f s: %s: %s", self._rank, waited, what, self._not_there())
        self._answers(lambda: self.check(0, what))  # a rank that came may have given up since

    @staticmethod
    def _answers(ask: Callable[[], Any]) -> Any:
        """What the store says; None while its host, which may be stopped for a while, says nothing."""
        try:
            return ask()
        except StoreSilentError:
            return None

    def _not_there(self) -> str:
        absent = self._answers(self._absent)
        return "the key-value store does not answer" if absent is None else f"{names(absent)} not there"

    def _check_exits(self, what: str) -> None:
        """Raise if a process has said that it ends without coming here."""
        if not self._store.has(exit_key()):
            return
        for rank in self._absent():
            if self._store.has(f"{exit_key()}/{self._members[rank]}"):
                reason = self._store.get(f"{exit_key()}/{self._members[rank]}")
                raise PeerLeftError(f"rank {self._rank}: {what}: rank {rank} will not come: {reason}")

    def _check_processes(self, what: str, ended: Callable[[Sequence[int]], Collection[int]]) -> None:
        """Raise if a process has ended without a word."""
        gone = ended(self._absent())
        self._check_exits(what)  # it may have said why since
        if gone:
            raise PeerLeftError(
                f"rank {self._rank}: {what}: {names(gone)} will not come: connections of the process group were closed by "
                "the end of the process (killed, or crashed)"
            )

    def _absent(self) -> list[int]:
        return [rank for rank in self._others() if not self._has("arrived", rank)]


def _number(alarm: str) -> int:
    """Which alarm of the run this was."""
    number = alarm.partition(" ")[0]
    return int(number) if number.isdecimal() else sys.maxsize
