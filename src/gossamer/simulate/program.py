"""Program: what rank 0 did in simulated steps, in an order that holds for every worker, however long each of them takes.

Moments differ between workers whose computation takes different times; what follows what does not. So a program is recorded
once, with the durations that operations had on the shared links, and carried out again by all workers
(:mod:`gossamer.simulate.replay`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from gossamer.comm.ops import Group, Op


@dataclass(slots=True, eq=False)
class Operation:
    """An operation, the members that take part (None: all), and the seconds from its start to its end.

    ``sent``: whether anything is sent, so that members wait for each other.
    """

    op: Op
    group: Group | None
    sent: bool
    seconds: float = 0.0


class Action(NamedTuple):
    """Of a flow: it computes for so many seconds, starts its n-th operation, or waits for it."""

    kind: Literal["work", "start", "wait"]
    value: float


@dataclass(slots=True, eq=False)
class FlowRecord:
    """One flow: what it did, in order, on its lane."""

    lane: int
    actions: list[Action] = field(default_factory=list)
    operations: list[Operation] = field(default_factory=list)

    def start(self, operation: Operation) -> None:
        """It has started an operation."""
        self.actions.append(Action("start", len(self.operations)))
        self.operations.append(operation)

    def wait(self, operation: Operation) -> None:
        """It waits for one of its operations."""
        self.actions.append(Action("wait", self.operations.index(operation)))

    def work(self, seconds: float) -> None:
        """It has computed."""
        self.actions.append(Action("work", seconds))


@dataclass(frozen=True, slots=True)
class Computed:
    """The loop has computed for ``seconds``, which has taken ``elapsed`` of them, beside what flows computed."""

    seconds: float
    elapsed: float


@dataclass(frozen=True, slots=True)
class Submitted:
    """The loop has submitted a flow."""

    flow: FlowRecord


@dataclass(frozen=True, slots=True)
class Waited:
    """The loop has waited for the flow that was submitted as the ``back``-th before this moment (1: the last one).

    ``late``: for as many steps it may be waited for later.
    """

    back: int
    late: int = 0


Instruction = Computed | Submitted | Waited
Program = Sequence[Sequence[Instruction]]
"""Of each step, what the loop did."""


class Recorder:
    """Writes the program of a loop down, step by step."""

    def __init__(self) -> None:
        self.steps: list[list[Instruction]] = [[]]
        self.submitted = 0
        self.number = 0
        """Of the step that is recorded; 0: what comes before the first one."""

    def begin_step(self) -> None:
        """What comes now belongs to the next step."""
        self.number += 1
        self.steps.append([])

    def forget(self) -> None:
        """Drop all steps so far."""
        self.steps = [[]]

    def submit(self, flow: FlowRecord) -> None:
        """The loop submits a flow."""
        self.submitted += 1
        self.steps[-1].append(Submitted(flow))

    def wait(self, number: int, late: int = 0) -> None:
        """The loop waits for the flow that was submitted as the ``number``-th, from 0 on."""
        self.steps[-1].append(Waited(self.submitted - number, late))

    def compute(self, seconds: float, elapsed: float) -> None:
        """The loop has computed."""
        if seconds or elapsed:
            self.steps[-1].append(Computed(seconds, elapsed))
