"""Waiting: how the main thread waits for a lane, and what it says when that takes long, or fails."""

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from gossamer.checks import is_number
from gossamer.comm.calls import differing, names
from gossamer.comm.runner import Ticket
from gossamer.comm.torch import board as failure_board
from gossamer.comm.torch.absence import Absence
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.calls import Call
from gossamer.comm.torch.connection_errors import first_line, is_connection_error
from gossamer.comm.torch.links import Links, slow_rank
from gossamer.comm.torch.store import StoreLostError, StoreSilentError
from gossamer.errors import CommunicationError, CommunicationTimeout, ConfigurationError, GossamerError

_logger = logging.getLogger("gossamer")

T = TypeVar("T")

SLICE = 0.2
"""Seconds for which the main thread waits at a time, so that Ctrl-C works and other ranks' failures are noticed."""

BUSY_SLICE = 0.002
"""The same, where there is something to do in between."""

ROLL_CALL = 3.0
"""Seconds within which the others answer where a connection was lost, of no known rank."""
LOOK_EVERY = 1.0
"""Seconds after which a waiting rank looks at the board, again and again."""


_NOBODY = "nobody can be asked who is late"

LOOKS_WITHOUT_STORE = 3
"""Looks in a row without a store after which a rank gives up."""


class Opening(Ticket[T]):
    """The promise of process groups, which are opened beside the flows: what others wait for may be called otherwise."""

    __slots__ = ()


class WaitPolicy:
    """Waits for tickets: never for ever, and never without saying for whom."""

    def __init__(self, board: FailureBoard, rank: int, timeout: float, store_is_vital: bool = True) -> None:
        """``store_is_vital``: whether a store that is lost means that a member of the group is."""
        self.timeout, self.store_is_vital = timeout, store_is_vital
        self.in_step = True
        """Whether flows of one number are the same one on all ranks."""
        self.links = Links()
        """The connections to the other ranks, once they are known."""
        self.opening_hint = ""
        """What to add where process groups cannot be opened."""
        self._board, self._rank = board, rank
        self._backlog: dict[int, float] = {}
        self.absence = Absence(lambda: board.waited)

    def wait(
        self, ticket: Ticket[Any], broken: Callable[[], Ticket[Any] | None], meanwhile: Callable[[], bool] | None = None
    ) -> Ticket[Any]:
        """Block until ``ticket`` is done, or another one has failed (``broken()``); returns that one.

        Raises when a rank posts a failure, when one leaves, when a host has vanished, and when the timeout is over.
        ``meanwhile``: what to do again and again until then; where it says that it got on, the wait begins anew.
        """
        wait = _Wait()
        self.absence.active()
        while not ticket.wait(SLICE if meanwhile is None else BUSY_SLICE):
            self.absence.active()
            if meanwhile is not None and meanwhile():
                wait.begin_anew()
            failed, waited = broken(), wait.seconds()
            if failed is not None:
                return failed
            if waited >= wait.next_look or waited >= self.timeout:
                self._require_hosts(ticket)
                self._note_backlog(waited)
                wait.lost = self._look(ticket, not wait.posted, wait.lost)
                wait.posted, wait.next_look = True, wait.next_look + LOOK_EVERY
                if isinstance(ticket, Call):
                    self._require_peers(ticket, meanwhile is None)
            if waited >= self.timeout:
                gave_up = CommunicationTimeout(self._timeout_text(ticket))
                raise (self._was_absent(gave_up) if _NOBODY in str(gave_up) else None) or gave_up
            if waited >= wait.next_warning:
                wait.next_warning *= 2
                self._require_same_flow(ticket)
                self._warn(ticket, waited)
        if wait.posted:
            self._go_on()
        return ticket

    def _require_hosts(self, ticket: Ticket[Any]) -> None:
        """Raise if hosts have vanished: without power, or behind a network that passes nothing on."""
        silent = self.links.silent()
        if not silent or ticket.done.is_set():
            return
        seconds = max(silent.values())
        who = f"{names(silent)} cannot be reached: nothing has been acknowledged for {seconds:.0f} s"
        if len(silent) == self._board.world - 1 > 1:
            who = f"no other rank can be reached for {seconds:.0f} s: the host of rank {self._rank} seems to be cut off"
        lost = CommunicationError(f"rank {self._rank} waits in {ticket}, but {who} (power, or the network between)")
        raise self._was_absent(lost) or lost

    def _require_peers(self, ticket: Ticket[Any], alike: bool) -> None:
        """Raise if processes have ended that a call waits for, or (``alike``) wait in something else."""
        if alike:
            self._require_same_flow(ticket)
        if self.links.closed() and not ticket.wait(SLICE):  # who has made this call may have closed the replica since
            raise self._lost(ticket, ConnectionError("connections were closed"))

    def _look(self, ticket: Ticket[Any], first: bool, lost: int) -> int:
        """Read the board. Returns for how many looks in a row there was no store."""
        try:
            if first:
                self._board.wait_in(ticket.sequence, _to_compare(ticket))
            self._board.check(ticket.sequence, str(ticket))
        except GossamerError:
            if not ticket.wait(SLICE):  # what was posted may have happened after this exchange
                raise
        except StoreSilentError:  # it may go on; or else the timeout ends this wait
            return lost
        except Exception as error:
            # Rank 0 may have ended well, its last messages still on their way to this one.
            if lost >= LOOKS_WITHOUT_STORE and self.store_is_vital:
                where = f"rank {self._rank} waits in {ticket}"
                raise self._was_absent(error) or CommunicationError(
                    f"{where}, and the key-value store is lost: {first_line(error)}"
                ) from error
            return lost + 1
        return 0

    def _was_absent(self, error: BaseException | None) -> CommunicationTimeout | None:
        """What ended this rank's run, if the others had to wait for it for longer than the timeout."""
        if self.absence.seconds < max(self.timeout, LOOK_EVERY):  # less may be this rank's own look at the board
            return None
        return CommunicationTimeout(
            f"rank {self._rank} was late: for {self.absence.seconds:.0f} s it took part in no exchange (stopped, or busy "
            f"otherwise), longer than the timeout ({self.timeout:g} s): the others have given up ({first_line(error)})"
        )

    def _go_on(self) -> None:
        try:
            self._board.wait_in(None)
        except Exception as error:
            _logger.debug("could not say that this rank goes on: %s", error)

    def _late(self, ticket: Ticket[Any]) -> str:
        """Who keeps a flow waiting, in words; empty if nobody knows."""
        try:
            late = self._board.late(ticket.sequence, _to_compare(ticket))
        except StoreSilentError as error:
            return str(error)
        except StoreLostError as error:
            return f"{_NOBODY}: {error}"
        except Exception as error:
            _logger.debug("could not ask who is late: %s", error)
            return ""
        return f"late: {names(late)}" if late else ""

    def _require_same_flow(self, ticket: Ticket[Any]) -> None:
        """Raise if others wait in something else, as after a collective call that only some ranks have made: no rank would
        ever go on."""
        label = _to_compare(ticket)
        if not self.in_step or not label:
            return
        try:
            elsewhere = self._board.elsewhere(ticket.sequence, label, isinstance(ticket, Call))
        except Exception as error:
            _logger.debug("could not ask in what others wait: %s", error)
            return
        if elsewhere and not ticket.done.is_set():
            raise differing(self._rank, ticket.label, elsewhere)

    def others_wait_elsewhere(self, label: str) -> bool:
        """Whether another rank has said that it waits in a flow of another name."""
        try:
            return any(at is not None and at[1] not in ("", label) for at in self._board.waits().values())
        except Exception as error:
            _logger.debug("could not ask in what others wait: %s", error)
            return False

    def _note_backlog(self, waited: float) -> None:
        """Measure how fast bytes go out to the other ranks; let all know it before anybody says who is slow."""
        mine = self.links.backed_up()
        if waited >= failure_board.WARN_AFTER / 2 and (mine or self._backlog):
            self._backlog = mine
            try:
                self._board.note_backlog(mine)
            except Exception as error:
                _logger.debug("could not say for whom bytes wait here: %s", error)

    def _slow(self) -> str:
        """Whose link keeps everybody waiting, in words."""
        try:
            everyone = self._board.backlogs() | {self._rank: self._backlog}
        except Exception as error:
            _logger.debug("could not ask for whom bytes wait elsewhere: %s", error)
            everyone = {}
        rank, rates = slow_rank(everyone), [rate for row in everyone.values() for rate in row.values()]
        if rank is None:
            return "every rank waits: the network is slow, or stuck"
        return f"every rank waits: the link of rank {rank} is slow, {8e-6 * max(rates):.2g} Mbit/s go over it"

    def _warn(self, ticket: Ticket[Any], waited: float) -> None:
        late = self._late(ticket) or self._slow()
        if not ticket.done.is_set():
            _logger.warning("rank %d has waited %.0f s in %s (%s)", self._rank, waited, ticket, late)

    def _timeout_text(self, ticket: Ticket[Any]) -> str:
        late = self._late(ticket)
        text = f"rank {self._rank} gave up after {self.timeout:g} s in {ticket}{late and '; '}{late}"
        return text + (self.opening_hint if isinstance(ticket, Opening) else "")

    def explain(self, ticket: Ticket[Any]) -> GossamerError:
        """The error to raise on the main thread for a flow that failed in its lane."""
        self.absence.active()
        error = ticket.error
        if isinstance(error, GossamerError):
            return error
        if is_connection_error(error):
            return self._lost(ticket, error)
        return CommunicationError(f"rank {self._rank}: {ticket} failed: {error!r}")

    def _lost(self, ticket: Ticket[Any], error: BaseException | None) -> GossamerError:
        """Why a connection was lost: what a failing or leaving rank has posted, or else which process has ended."""
        text = f"rank {self._rank}: connection lost in {ticket}"
        hint = self.opening_hint if isinstance(ticket, Opening) else ""
        try:
            who = self._who_ended(ticket)
        except GossamerError as reason:
            return reason
        except Exception as lost:
            who = f"the key-value store is lost too: {first_line(lost)}"
            if closed := self.links.closed():
                who = f"{names(closed)} ended, and {who}"
        ended = CommunicationError(f"{text}; {who} ({first_line(error)}){hint}")
        return (None if isinstance(ticket, Opening) else self._was_absent(ended)) or ended

    def _who_ended(self, ticket: Ticket[Any]) -> str:
        """Whose process has closed its connections without a word; raises what a rank has posted."""
        self._board.check(ticket.sequence, str(ticket))
        end = time.monotonic() + (_CLOSING if self.links else 0.0)
        while not (closed := self.links.closed()) and time.monotonic() < end:
            time.sleep(0.02)
        self._board.check(ticket.sequence, str(ticket))  # who gives up posts why, and closes its connections then
        if closed:
            self._board.note_missing(closed)
            return f"{names(closed)} ended without a word (killed, or crashed)"
        missing = self._board.roll_call(ROLL_CALL)
        return f"no answer (ended, or busy with something else): {names(missing)}" if missing else "every rank still answers"


_CLOSING = 0.5
"""Seconds within which all connections of a process that ends are closed."""


class _Wait:
    """How far one wait has come. Times are seconds since its beginning."""

    def __init__(self) -> None:
        self.posted = False
        """Whether the board says where this rank waits."""
        self.begin_anew()

    def begin_anew(self) -> None:
        """What was waited for got on."""
        self._begin, self.next_look, self.next_warning = time.monotonic(), LOOK_EVERY, failure_board.WARN_AFTER
        self.lost = 0
        """For how many looks in a row there was no store."""

    def seconds(self) -> float:
        """Since the beginning."""
        return time.monotonic() - self._begin


def _to_compare(ticket: Ticket[Any]) -> str:
    """What others that wait in something of this number call it, too; empty if they need not."""
    return "" if isinstance(ticket, Opening) else ticket.label


def seconds_of(timeout: float | timedelta | None, group_timeout: timedelta) -> float:
    """Seconds that an exchange may take: what the user gave, or the process group's own timeout."""
    if timeout is None:
        return group_timeout.total_seconds()
    seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
    if not (is_number(seconds) and 0 < seconds < math.inf):
        raise ConfigurationError(f"timeout must be a positive number of seconds, or a timedelta; got {timeout!r}")
    return float(seconds)
