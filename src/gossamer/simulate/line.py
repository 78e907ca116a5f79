"""Line: a link whose rate the transfers under way share evenly, as connections of TCP do (processor sharing)."""

import heapq
import math
from functools import partial
from itertools import count

from gossamer.comm.ops import Traffic
from gossamer.simulate.clock import Clock, Event
from gossamer.simulate.profile import Link


class SharedLine:
    """A link in use. A transfer ends when its bytes are there, and the latency of each of its rounds has passed.

    Each transfer under way has the same share of the rate, or what the window allows. So all have received the same number
    of bits since a moment at which they all were under way, and the one that ends first is the one for which that number is
    reached first.
    """

    def __init__(self, clock: Clock, link: Link) -> None:
        self.link = link
        self._clock = clock
        self._under_way: list[tuple[float, int, float, Event]] = []
        """When each ends (as a value of ``_served``), its number, its latencies, and its end; a heap."""
        self._numbers = count()
        self._served = 0.0
        """Bits that one transfer would have received by now if it had been under way from the beginning."""
        self._since = 0.0
        """The moment of which ``_served`` is."""
        self._version = 0
        """Of what was planned as the next end."""

    def send(self, traffic: Traffic, beside: float = 0.0) -> Event:
        """Begin a transfer now; the event is its end. ``beside``: seconds of its rounds on other links."""
        done, waits = Event(), self.link.latency * traffic.rounds + beside
        if math.isinf(self._speed(1)) or traffic.bytes == 0:
            self._arrive(waits, done)
            return done
        self._serve()
        heapq.heappush(self._under_way, (self._served + 8 * traffic.bytes, next(self._numbers), waits, done))
        self._plan()
        return done

    def _arrive(self, waits: float, done: Event) -> None:
        if waits == 0:
            done.set()
        else:
            self._clock.at(self._clock.now + waits, done.set)

    def _speed(self, transfers: int) -> float:
        """Bits per second of each of so many."""
        return min(self.link.goodput / transfers, self.link.most_of_one)

    def _serve(self) -> None:
        """Let the transfers under way receive what they have received since the last time."""
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
        if version != self._version:  # another transfer has begun since
            return
        self._since, self._served = self._clock.now, self._under_way[0][0]
        while self._under_way and self._under_way[0][0] <= self._served + _EQUAL:
            _, _, waits, done = heapq.heappop(self._under_way)
            self._arrive(waits, done)
        self._plan()


_EQUAL = 1e-3
"""Bits by which ends may differ and be one."""
