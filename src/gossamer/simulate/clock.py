"""Clock: virtual time, the processes that live in it, and the program that lets it pass.

A process is a generator. It yields a moment to sleep until, or an :class:`Event` to wait for; between two yields no
time passes. What happens at the same moment happens in the order in which it was asked for. The program itself is no
process: it lets time pass (:meth:`Clock.advance`), or waits (:meth:`Clock.run_until`).
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


def both(first: Event, second: Event) -> Event:
    """Happens when two events have."""
    if first.happened or second.happened:
        return second if first.happened else first
    done = Event()

    def one_more() -> None:
        if first.happened and second.happened:
            done.set()

    first.then(one_more)
    second.then(one_more)
    return done


Process = Generator[float | Event, None, None]


class Clock:
    """Runs processes in order of virtual time. ``now`` is in seconds."""

    def __init__(self) -> None:
        self.now = 0.0
        self._agenda: list[tuple[float, int, Action]] = []
        self._order = count()

    def spawn(self, process: Process) -> None:
        """Start a process now."""
        self.at(self.now, partial(self._resume, process))

    def at(self, moment: float, action: Action) -> None:
        """Call ``action`` at this moment, or now if that is past."""
        heapq.heappush(self._agenda, (max(moment, self.now), next(self._order), action))

    def advance(self, moment: float) -> None:
        """Let time pass until ``moment``, with all that happens until then and at it."""
        while self._agenda and self._agenda[0][0] <= moment:
            self._next()
        self.now = max(self.now, moment)

    def run_until(self, done: Callable[[], bool]) -> None:
        """Let time pass until ``done()`` holds.

        Raises:
            RuntimeError: nothing is left to happen, and it does not hold.
        """
        while not done():
            if not self._agenda:
                raise RuntimeError("a simulated training loop waits for what never happens")
            self._next()

    def run_out(self) -> None:
        """Let time pass until nothing is left to happen."""
        while self._agenda:
            self._next()

    def _next(self) -> None:
        self.now, _, action = heapq.heappop(self._agenda)
        action()

    def _resume(self, process: Process) -> None:
        resume = partial(self._resume, process)
        for awaited in process:
            if isinstance(awaited, Event):
                if awaited.happened:
                    continue
                awaited.then(lambda: self.at(self.now, resume))
            else:
                self.at(awaited, resume)
            return
