"""Absence: for how long this rank took part in no exchange, and whether the others have gone on with it since.

A rank that was stopped, or busy otherwise, for longer than the timeout finds that the others have given up. Whatever ends its
wait then (a closed connection, a lost store), it is told that it was late.
"""

import time
from collections.abc import Callable


class Absence:
    """The longest absence that others may not have forgiven. ``asked``: seconds for which the store was waited for, so far."""

    def __init__(self, asked: Callable[[], float]) -> None:
        self._asked = asked
        self._active, self._next = self._now(), 0
        self._since, self._resumed = 0, False
        self.seconds = 0.0

    def _now(self) -> float:
        return time.monotonic() - self._asked()  # this rank's own questions are no absence

    def active(self, begins: int | None = None) -> None:
        """This rank takes part; ``begins``: the number of the flow that it begins."""
        now = self._now()
        if begins is not None:
            self._next = begins
        if now - self._active >= self.seconds:
            self.seconds, self._resumed = now - self._active, False
            self._since = self._next if begins is not None else self._next + 1
        self._active = now

    def ended(self, sequence: int) -> None:
        """A flow has ended well. One that began after the return may have been sent by others before they gave up; one that
        began after the end of such a flow shows that they have gone on."""
        if sequence >= self._since:
            if self._resumed:
                self.seconds = 0.0
            self._resumed, self._since = True, self._next + 1
