"""Patience: how the main thread waits for a lane, and what it says when that takes long, or fails."""

import logging
import math
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from gossamer.checks import is_number
from gossamer.comm import bulletin
from gossamer.comm.bulletin import Bulletin, StoreLostError, StoreSilentError, names
from gossamer.comm.runner import Ticket
from gossamer.errors import CommunicationError, CommunicationTimeout, ConfigurationError, GossamerError, UsageError

logger = logging.getLogger("gossamer")

T = TypeVar("T")

SLICE = 0.2
"""Seconds for which the main thread waits at a time, so that Ctrl-C works and other ranks' alarms are heard."""

BUSY_SLICE = 0.002
"""The same, where there is something to do in between."""

LOOK_EVERY = 1.0
"""Seconds after which a waiting rank looks at the board, again and again."""


LOOKS_WITHOUT_STORE = 3
"""Looks in a row without a store after which a rank gives up."""


class Opening(Ticket[T]):
    """The promise of process groups, which are opened beside the flows: what others wait for may be called otherwise."""

    __slots__ = ()


class Patience:
    """Waits for tickets: never for ever, and never without saying for whom."""

    def __init__(self, board: Bulletin, rank: int, timeout: float, store_is_vital: bool = True) -> None:
        """``store_is_vital``: whether a store that is lost means that a member of the group is."""
        self.timeout, self._store_is_vital = timeout, store_is_vital
        self.in_step = True
        """Whether flows of one number are the same one on all ranks."""
        self._board, self._rank = board, rank

    def wait(
        self, ticket: Ticket[Any], broken: Callable[[], Ticket[Any] | None], meanwhile: Callable[[], bool] | None = None
    ) -> Ticket[Any]:
        """Block until ``ticket`` is done, or another one has failed (``broken()``); returns that one.

        Raises when a rank posts a failure, when one leaves, and when the timeout is over. ``meanwhile``: what to do again
        and again until then; where it says that it got on, patience begins anew.
        """
        begin, next_look, posted, warned, lost = time.monotonic(), LOOK_EVERY, False, False, 0
        while not ticket.wait(SLICE if meanwhile is None else BUSY_SLICE):
            if meanwhile is not None and meanwhile():
                begin, next_look, warned, lost = time.monotonic(), LOOK_EVERY, False, 0
            failed, waited = broken(), time.monotonic() - begin
            if failed is not None:
                return failed
            if waited >= self.timeout:
                raise CommunicationTimeout(self._timeout_text(ticket))
            if waited >= next_look:
                lost = self._look(ticket, not posted, lost)
                posted = True
                next_look += LOOK_EVERY
            if waited >= bulletin.WARN_AFTER and not warned:
                warned = True
                self._warn(ticket, waited)
                self._require_same_flow(ticket)
        if posted:
            self._go_on()
        return ticket

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
            if lost >= LOOKS_WITHOUT_STORE and self._store_is_vital:
                where = f"rank {self._rank} waits in {ticket}"
                raise CommunicationError(f"{where}, and the key-value store is lost: {first_line(error)}") from error
            return lost + 1
        return 0

    def _go_on(self) -> None:
        try:
            self._board.wait_in(None)
        except Exception as error:
            logger.debug("could not say that this rank goes on: %s", error)

    def _late(self, ticket: Ticket[Any]) -> str:
        """Who keeps a flow waiting, in words; empty if nobody knows."""
        try:
            late = self._board.late(ticket.sequence, _to_compare(ticket))
        except StoreSilentError as error:
            return str(error)
        except StoreLostError as error:
            return f"nobody can be asked who is late: {error}"
        except Exception as error:
            logger.debug("could not ask who is late: %s", error)
            return ""
        return f"late: {names(late)}" if late else ""

    def _require_same_flow(self, ticket: Ticket[Any]) -> None:
        """Raise if others wait in something else, as after a collective call that only some ranks have made: no rank would
        ever go on."""
        label = _to_compare(ticket)
        if not self.in_step or not label:
            return
        try:
            elsewhere = self._board.elsewhere(ticket.sequence, label)
        except Exception as error:
            logger.debug("could not ask in what others wait: %s", error)
            return
        if elsewhere and not ticket.done.is_set():
            others = "; ".join(f"rank {rank} in {label}" for rank, label in elsewhere.items())
            raise UsageError(
                f"rank {self._rank} waits in {ticket.label}, but {others}: not all ranks have made the same calls. Every rank "
                "enters consensus(), and calls consensus_distance(), state_dict(), load_state_dict() and close(average=True)"
            )

    def _warn(self, ticket: Ticket[Any], waited: float) -> None:
        late = self._late(ticket) or "every rank waits: the network is slow, or stuck"
        if not ticket.done.is_set():
            logger.warning("rank %d has waited %.0f s in %s (%s)", self._rank, waited, ticket, late)

    def _timeout_text(self, ticket: Ticket[Any]) -> str:
        late = self._late(ticket)
        return f"rank {self._rank} gave up after {self.timeout:g} s in {ticket}{late and '; '}{late}"

    def explain(self, ticket: Ticket[Any]) -> GossamerError:
        """The error to raise on the main thread for a flow that failed in its lane."""
        error = ticket.error
        if isinstance(error, GossamerError):
            return error
        if is_connection_error(error):
            return self._lost(ticket, error)
        return CommunicationError(f"rank {self._rank}: {ticket} failed: {error!r}")

    def _lost(self, ticket: Ticket[Any], error: BaseException | None) -> GossamerError:
        """Why a connection was lost: what a failing or leaving rank has posted, or else who no longer answers."""
        text = f"rank {self._rank}: connection lost in {ticket}"
        try:
            self._board.check(ticket.sequence, str(ticket))
            missing = self._board.roll_call()
            who = f"no answer (ended, or busy with something else): {names(missing)}" if missing else "every rank still answers"
            text += f"; {who}"
        except GossamerError as reason:
            return reason
        except Exception as lost:
            text += f"; the key-value store is lost too: {first_line(lost)}"
        return CommunicationError(f"{text} ({first_line(error)})")


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


def is_connection_error(error: BaseException | None) -> bool:
    """Whether the transport, not an algorithm, raised this."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        mark in text for mark in ("gloo", "onnection", "NCCL", "ncclRemote", "ocket", "Timed out", "timed out")
    )


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text, without the general advice that Gloo adds."""
    return str(error).strip().split("\n")[0].split(". This is typically")[0][:200]
