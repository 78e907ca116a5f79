"""Line: a link whose rate the transfers under way share evenly, as connections of TCP do (processor sharing)."""

import heapq
import math
from collections.abc import Callable
from functools import partial
from itertools import count

from gossamer.comm.operations import Traffic
from gossamer.simulate.clock import Action, Clock, Event
from gossamer.simulate.profile import Link


class Shared:
    """A resource that is used by several at a time, each with the same share of its ``rate``, up to ``most``.

    So all have received as much since a moment at which they all were there, and the one that ends first is the one for which
    that amount is reached first.
    """

    def __init__(self, clock: Clock, rate: float, most: float, equal: float = 1e-3) -> None:
        """Per second. ``equal``: amounts by which ends may differ and be one."""
        self._clock, self._rate, self._most, self._equal = clock, rate, most, equal
        self._under_way: list[tuple[float, int, Action]] = []
        """When each ends (as a value of ``_served``), its number, and what then happens; a heap."""
        self._numbers = count()
        self._served = 0.0
        """What one would have received by now if it had been there from the beginning."""
        self._since = 0.0
        """The moment of which ``_served`` is."""
        self._version = 0
        """Of what was planned as the next end."""

    def serve(self, amount: float, then: Action) -> None:
        """Begin to use it now; ``then`` is called when ``amount`` has been received."""
        if amount <= 0 or math.isinf(self._speed(1)):
            then()
            return
        self._serve()
        heapq.heappush(self._under_way, (self._served + amount, next(self._numbers), then))
        self._plan()

    def _speed(self, users: int) -> float:
        """Per second, of each of so many."""
        return min(self._rate / users, self._most)

    def _serve(self) -> None:
        """Let all receive what they have received since the last time."""
        if self._under_way:
            self._served += (self._clock.now - self._since) * self._speed(len(self._under_way))
        self._since = self._clock.now

    def _plan(self) -> None:
        """Plan the next end."""
        self._version += 1
        if self._under_way:
            seconds = max(0.0, self._under_way[0][0] - self._served) / self._speed(len(self._under_way))
            self._clock.at(self._clock.now + seconds, partial(self._end, self._version))

    def _end(self, version: int) -> None:
        if version != self._version:  # another one has begun since
            return
        self._since, self._served = self._clock.now, self._under_way[0][0]
        ended: list[Callable[[], None]] = []
        while self._under_way and self._under_way[0][0] <= self._served + self._equal:
            ended.append(heapq.heappop(self._under_way)[2])
        for then in ended:
            then()
        self._plan()


class SharedLine:
    """A link in use. A transfer ends when its bytes are there, and the latency of each of its rounds has passed.

    Each transfer under way has the same share of the rate, or what the window allows.
    """

    def __init__(self, clock: Clock, link: Link) -> None:
        self.link = link
        self._clock = clock
        self._shared = Shared(clock, link.goodput, link.most_of_one)

    def send(self, traffic: Traffic, waits: float | None = None) -> Event:
        """Begin a transfer now; the event is its end. ``waits``: the seconds of its rounds, where some are on other links."""
        done, waits = Event(), self.link.latency * traffic.rounds if waits is None else waits
        self._shared.serve(8 * traffic.bytes, partial(self._arrive, waits, done))
        return done

    def _arrive(self, waits: float, done: Event) -> None:
        if waits == 0:
            done.set()
        else:
            self._clock.at(self._clock.now + waits, done.set)
