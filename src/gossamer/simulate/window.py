"""Window: the steps of a simulated run that its figures are the mean of."""

from dataclasses import dataclass

import torch

from gossamer.algorithms.base import Algorithm
from gossamer.simulate.clock import Process
from gossamer.simulate.training import Totals, Training


@dataclass(frozen=True)
class Window:
    """``steps`` steps after ``warmup`` others, from ``first`` on: whole cycles of what travels.

    ``exchanges``: where they may lag, after how many they repeat themselves. Then so many more steps that both ends are where
    one has just begun: two that lie in other places between two steps would not count alike.
    """

    first: int
    warmup: int
    steps: int
    exchanges: int | None

    @classmethod
    def of(cls, algorithm: Algorithm, world: int, machines: int, warmup: int, steps: int) -> "Window":
        """At least so many steps, once the last part's time has begun and everything was exchanged once."""
        cadence = algorithm.cadence
        cycle, period = cadence.cycle(world, machines), cadence.period
        cycle = cycle if cycle <= _LONGEST_CYCLE else period
        return cls(
            first=max(cadence.changes, default=0),
            warmup=warmup + period * (1 + cadence.lag) - 1,
            steps=-(-steps // cycle) * cycle,
            exchanges=cycle // cadence.step_of(1) if cadence.lag else None,
        )


_LONGEST_CYCLE = 512
"""Steps of a whole cycle of partners that are worth a run through all of them."""


def per_step(training: Training, window: Window) -> Totals:
    """What ``training.totals()`` grow by per step, in the mean over the window."""
    marks: list[tuple[int, int, Totals]] = []

    def is_a_mark(number: int) -> bool:
        if number < (marks[0][0] + window.steps if marks else window.first + window.warmup):
            return False
        if window.exchanges is None:
            return True
        return training.begun is not None and (not marks or (training.begun - marks[0][1]) % window.exchanges == 0)

    def loop() -> Process:
        number = window.first
        while True:
            if is_a_mark(number):
                marks.append((number, training.begun or 0, training.totals()))
                if len(marks) == 2:
                    return
            yield from training.step(number)
            number += 1

    with torch.no_grad():
        training.clock.spawn(loop())
        training.clock.run()
    (begin, _, before), (end, _, after) = marks
    return Totals(*((there - here) / (end - begin) for here, there in zip(before, after, strict=True)))
