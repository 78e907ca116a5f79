"""Window: the steps of a simulated run that its figures are the mean of."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.cadence import Beat, Cadence
from gossamer.comm.topology import Topology, exchange_at
from gossamer.simulate.clocked import ClockedRunner, Wire
from gossamer.simulate.program import Program
from gossamer.simulate.trace import is_collecting, tell_step


class Totals(NamedTuple):
    """What a run took."""

    seconds: float
    exposed: float
    """Seconds in which the loop stood still for communication."""
    sent: float
    """Bytes of this rank."""
    messages: float
    busiest: float
    """Seconds that the link of the busiest rank, machine or site has payload."""
    inside: float
    """Bytes that leave no machine."""
    processing: float
    """Seconds of a core for codecs, copies and the transport's own work."""

    @classmethod
    def of(cls, runner: ClockedRunner, wire: Wire) -> "Totals":
        """So far."""
        return cls(
            runner.now(),
            runner.exposed_seconds,
            wire.meter.bytes,
            wire.meter.messages,
            wire.most_seconds,
            wire.inside_bytes,
            wire.processing.seconds,
        )


@dataclass(frozen=True)
class Window:
    """``steps`` steps after ``warmup`` others: whole cycles of what travels, of ``cycle`` steps each.

    ``until_alike``: it ends where two cycles that follow each other were alike, as all others are then. ``exchanges``: where
    they may lag, after how many they repeat themselves. Then so many more steps that both ends are where one has just begun:
    two that lie in other places between two steps would not count alike.
    """

    warmup: int
    steps: int
    cycle: int
    until_alike: bool
    exchanges: int | None

    @classmethod
    def of(
        cls, algorithm: Algorithm, world: int, machines: int, warmup: int, steps: int | None, overlap: bool, alike: bool = False
    ) -> "Window":
        """At least so many steps, once the last part's time has begun and everything was exchanged once.

        ``steps``: None: until two cycles are alike, at most ``USUAL``. ``overlap``: with the forward pass, before which a
        replica learns in which order buckets are to leave. ``alike``: all workers are, and all links between them.
        """
        # The order of gradients is learned in the first step, and that of the buckets in the next one.
        learning = 0 if algorithm.part("gradients") is None else 3 if overlap else 2
        cadence = algorithm.cadence
        period, exchanged = cadence.period, math.lcm(*(beat.every for beat in cadence.beats))
        cycle = (_without_partners(cadence, world) if alike else cadence).cycle(world, machines)
        cycle = cycle if cycle <= _LONGEST_CYCLE else period
        first = max(cadence.changes, default=0)
        if exchanged > 1:  # what the first exchange sends more is not in the window
            warmup = max(warmup, 1 + max(cadence.delays))
        return cls(
            warmup=first + max(warmup + exchanged * (1 + cadence.lag) - 1, learning),
            steps=-(-(steps or USUAL) // cycle) * cycle,
            cycle=cycle,
            until_alike=steps is None and not cadence.lag,  # where exchanges may lag, cycles differ in length
            exchanges=cycle // cadence.step_of(1) if cadence.lag else None,
        )


def _without_partners(cadence: Cadence, world: int) -> Cadence:
    """The same without partners that change, where each rank sends as many messages in every step, and as many arrive."""
    return replace(cadence, beats=tuple(replace(beat, topology=None) if _even(beat, world) else beat for beat in cadence.beats))


def _even(beat: Beat, world: int) -> bool:
    """Whether every rank has as many partners in each step."""
    topology = beat.topology
    if not isinstance(topology, Topology) or not topology.repeats or beat.ranks_per_node != 1:
        return False
    steps = [exchange_at(topology, step, world).permutations for step in range(topology.cycle(world))]
    everyone = np.arange(world)
    return len(set(map(len, steps))) == 1 and all((np.array(each.to) != everyone).all() for step in steps for each in step)


USUAL = 8
"""Steps of a window, unless it is said how many."""

_LONGEST_CYCLE = 512
"""Steps of a whole cycle of partners that are worth a run through all of them."""

_ALIKE, _NOTHING = 1e-9, 1e-12
"""By which share of what there is so far, and by how much beside, totals of two cycles may differ that are alike."""


class Cycles:
    """Whether the last two of the cycles so far were alike."""

    def __init__(self, window: Window) -> None:
        self._window = window
        self._ends: list[Totals] = []

    def repeat(self, number: int, totals: Totals) -> bool:
        """``number``: of steps since the window began."""
        if not self._window.until_alike or number % self._window.cycle:
            return False
        self._ends = [*self._ends[-2:], totals]
        if len(self._ends) < 3:
            return False
        first, second, third = self._ends
        return all(abs((c - b) - (b - a)) <= _ALIKE * abs(c) + _NOTHING for a, b, c in zip(first, second, third, strict=True))


def per_step(step: Callable[[], object], runner: ClockedRunner, wire: Wire, window: Window) -> tuple[Totals, Program]:
    """By how much the totals grow per ``step()``, in the mean over the window; and what its steps did."""
    marks: list[tuple[int, int, Totals]] = []
    number = exchanges = 0
    just_begun, cycles = False, Cycles(window)

    def is_a_mark() -> bool:
        if marks and cycles.repeat(number - marks[0][0], Totals.of(runner, wire)):
            return True
        if number < (marks[0][0] + window.steps if marks else window.warmup):
            return False
        if window.exchanges is None:
            return True
        return just_begun and (not marks or (exchanges - marks[0][1]) % window.exchanges == 0)

    while len(marks) < 2:
        if is_a_mark():
            if not marks:
                runner.recorder.forget()
            marks.append((number, exchanges, Totals.of(runner, wire)))
            continue
        before = runner.submitted
        tell_step(runner.now())
        runner.recorder.begin_step()
        step()
        number, just_begun = number + 1, runner.submitted > before
        exchanges += just_begun
    tell_step(runner.now())
    (begin, _, before_totals), (end, _, after_totals) = marks
    mean = Totals(*((there - here) / (end - begin) for here, there in zip(before_totals, after_totals, strict=True)))
    if wire.records or is_collecting():
        runner.recorder.begin_step()
        step()  # beside which the last flows end as those before them did
        runner.run_out()
    return mean, runner.recorder.steps[1:-1]
