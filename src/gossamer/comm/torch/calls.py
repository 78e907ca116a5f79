"""Calls: in which call of a replica each rank is, told on the failure board before any of its messages is sent.

Note [calls before messages]: a message on the control lane that another rank does not expect ends that rank's process inside
Gloo, where sizes differ (``std::terminate``). So a call that all ranks make begins here: each posts its name, and sends
nothing until all have posted the same one. A rank that made the call alone is told by the board where the others wait.
"""

import time

from gossamer.comm.calls import differing
from gossamer.comm.runner import Ticket
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.store import StoreLostError, StoreSilentError

_LONGEST_PAUSE = 0.05
"""Seconds between two looks at who is there."""


class Call(Ticket[None]):
    """The promise that every rank has made one call: the ``number``-th of each rank, before flow ``sequence``.

    ``store_is_vital``: as for a wait policy, which ends the wait; where others may take the store away, nothing is compared
    without it.
    """

    __slots__ = ("_board", "_next_look", "_number", "_pause", "_posted", "_store_is_vital")

    def __init__(self, board: FailureBoard, sequence: int, number: int, call: str, store_is_vital: bool) -> None:
        super().__init__(sequence, call)
        self._board, self._number, self._store_is_vital = board, number, store_is_vital
        self._posted, self._pause, self._next_look = False, 0.001, 0.0

    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self.done.is_set() and not self._looked():
            left = min(end, self._next_look) - time.monotonic()
            if left > 0:
                time.sleep(left)
            if time.monotonic() >= end:
                return self.done.is_set()
        return True

    def _looked(self) -> bool:
        """Say that this rank is here, and look at who else is, if it is time to; whether all are."""
        now = time.monotonic()
        if now < self._next_look:
            return False
        self._next_look, self._pause = now + self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        try:
            if not self._posted:
                self._board.call(self._number, self.label)
                self._posted = True
            if self._all_are_here():
                self.done.set()
        except StoreSilentError:
            return False
        except StoreLostError:
            if not self._store_is_vital:
                self.done.set()
        return self.done.is_set()

    def _all_are_here(self) -> bool:
        calls = self._board.calls()
        other = {rank: call for rank, (number, call) in calls.items() if number == self._number and call != self.label}
        if other:
            raise differing(self._board.rank, self.label, other)
        return all(number >= self._number for number, _ in calls.values())

    def __str__(self) -> str:
        return self.label
