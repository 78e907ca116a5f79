"""Clock: virtual time, and the processes that live in it.

A process is a generator. It yields a moment to sleep until, or an :class:`Event` to wait for; between two yields no
time passes. What happens at the same moment happens in the order in which it was asked for.
"""

import heapq
from collections.abc import Callable, Generator
from functools import partial
from itertools import count

Action = Callable[[], None]


class Event:
    """Something that happens once. Processes may wait for it, before or after."""

    def __init__(self) -> None:
        self.happened = False
        self._waiting: list[Action] = []

    def set(self) -> None:
        """It happens now."""
        self.happened = True
        for resume in self._waiting:
            resume()
        self._waiting.clear()

    def then(self, resume: Action) -> None:
        """Call ``resume`` when it happens."""
        self._waiting.append(resume)


Process = Generator[float | Event, None, None]


class Clock:
    """Runs processes in order of virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Action]] = []
        self._order = count()

    def spawn(self, process: Process) -> None:
        """Start a process now."""
        self._at(self.now, partial(self._resume, process))

    def run(self) -> None:
        """Let time pass until nothing is left to happen."""
        while self._agenda:
            self.now, _, action = heapq.heappop(self._agenda)
            action()

    def _at(self, moment: float, action: Action) -> None:
        heapq.heappush(self._agenda, (max(moment, self.now), next(self._order), action))

    def _resume(self, process: Process) -> None:
        resume = partial(self._resume, process)
        for awaited in process:
            if isinstance(awaited, Event):
                if awaited.happened:
                    continue
                awaited.then(lambda: self._at(self.now, resume))
            else:
                self._at(awaited, resume)
            return
