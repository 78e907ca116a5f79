"""Under way: the flows of a runner that were submitted and have not been waited for."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gossamer.comm.runner import Ticket

_OPENING = -1  # stands for the opening of process groups among the flows


class UnderWay:
    """Tickets by number, in the order of submission, which is the same on all ranks."""

    def __init__(self) -> None:
        self.submitted = 0
        """How many flows were submitted so far: the number of the next one."""
        self._tickets: dict[int, Ticket[Any]] = {}

    def __iter__(self) -> Iterator[Ticket[Any]]:
        return iter(list(self._tickets.values()))

    def __len__(self) -> int:
        return len(self._tickets)

    @property
    def first(self) -> int:
        """The number of the first flow that was not waited for."""
        return min((ticket.sequence for ticket in self), default=self.submitted)

    def add(self, ticket: Ticket[Any]) -> None:
        """A flow is submitted."""
        self._tickets[self.submitted] = ticket
        self.submitted += 1

    def remove(self, ticket: Ticket[Any]) -> None:
        """A flow has been waited for."""
        self._tickets.pop(ticket.sequence, None)

    @contextmanager
    def opening(self, ticket: Ticket[Any]) -> Iterator[None]:
        """Inside, process groups are opened beside the flows; after an error it stays among them."""
        self._tickets[_OPENING] = ticket
        yield
        del self._tickets[_OPENING]

    def failed(self) -> Ticket[Any] | None:
        """A flow that has failed while another is waited for: the lanes are independent, so that one may never end."""
        return next((ticket for ticket in self._tickets.values() if ticket.failed), None)

    def origin(self, ticket: Ticket[Any]) -> Ticket[Any]:
        """The flow in which an error arose that also ended ``ticket``, which was queued behind it."""
        return next((each for each in self._tickets.values() if each.error is ticket.error and each.begun), ticket)

    def finish(self, arrived: Callable[[Ticket[Any]], bool], seconds: float) -> None:
        """Let other ranks have the messages that were promised to them, if that does not take longer."""
        end = time.monotonic() + seconds
        for ticket in self:
            ticket.wait(max(0.0, end - time.monotonic()))
            while not arrived(ticket) and time.monotonic() < end:
                time.sleep(0.01)
