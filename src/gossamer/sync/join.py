"""Join: ranks whose data end early keep answering, until the data of all have ended."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum

import torch

from gossamer.comm.ops import all_reduce
from gossamer.comm.runner import Runner


class Event(IntEnum):
    """What the ranks that still train are about to do together; ``ENDED``: none of them trains any more."""

    ENDED = 0
    BUFFERS = 1
    BACKWARD = 2
    WEIGHTS = 3  # plus the index of the optimizer


class Join:
    """Inside :meth:`active`, each collective event is announced; a rank that has ended mirrors it with nothing to add."""

    def __init__(self, runner: Runner, mirror: Mapping[Event, Callable[[int], None]]) -> None:
        self.shadowing = False
        self._on = False
        self._runner, self._mirror = runner, mirror

    def announce(self, event: Event, index: int = 0) -> None:
        """Say what comes next, if anyone may have ended."""
        if self._on and not self.shadowing:
            self._agree(event + index)

    def _agree(self, event: int) -> int:
        mine = torch.tensor([event], dtype=torch.int64)
        return int(self._runner.run(lambda: all_reduce(mine, "max"), "the announcement of what comes next").item())

    @contextmanager
    def active(self, conclude: Callable[[int], None]) -> Iterator[None]:
        """Train inside; then mirror the others to their end. ``conclude(rank)`` gets a rank that trained to the end."""
        self._on = True
        try:
            yield
            mirrored = self._shadow()
            last = torch.tensor([-1 if mirrored else self._runner.rank], dtype=torch.int64)
            conclude(int(self._runner.run(lambda: all_reduce(last, "max"), "the choice of the last rank").item()))
        finally:
            self._on = False

    def _shadow(self) -> int:
        """Mirror events until there are none; returns how many there were."""
        mirrored = 0
        self.shadowing = True
        try:
            while (event := self._agree(Event.ENDED)) != Event.ENDED:
                kind = Event(min(event, Event.WEIGHTS))
                self._mirror[kind](event - kind)
                mirrored += 1
        finally:
            self.shadowing = False
        return mirrored
