"""Cadence: when an algorithm exchanges, as one object: how often, in which fragments, how far ahead, how late."""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from gossamer.comm.topology import Pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """Exchanges at every step s from ``first`` to before ``until`` with s ≡ ``offset`` (mod ``every``)."""

    every: int = 1
    offset: int = 0
    first: int = 0
    until: float = math.inf
    once: bool = False
    """Only at ``first``: a phase begins, and takes over what the one before has kept."""
    ahead: float = 0.0
    """By how many updates the weights that are sent are extrapolated (SpecTrain)."""
    delay: int = 1
    """How many steps after its own an exchange of weights is added: before the update of that step (with ``Cadence.late``,
    after it); 0: in the same step, which waits for it."""
    merge: float | None = None
    """The share that stays of the weights w where a result is added: w ← merge·w + (1 - merge)·x, with x what the exchange
    makes of the weights that were sent. None: what it changes of those is added to w."""
    exchanges: int = 1
    """After how many exchanges bytes and messages repeat."""
    topology: Pattern | None = None
    """The partners of each exchange, where these change."""
    ranks_per_node: int | None = 1
    """How many ranks one member of the topology stands for; None: those of its node."""

    def runs(self, step: int) -> bool:
        """Whether ``step`` is within its time."""
        return self.first <= step < self.until

    def due(self, step: int) -> bool:
        """Whether anything is exchanged at ``step``."""
        return step == self.first if self.once else self.runs(step) and (step - self.offset) % self.every == 0

    def cycle(self, world: int, nodes: int) -> int:
        """After how many steps ``world`` ranks on so many nodes have the same partners again."""
        members = nodes if self.ranks_per_node is None else -(-world // self.ranks_per_node)
        partners = 1 if self.topology is None else self.topology.cycle(members)
        return self.every * math.lcm(self.exchanges, partners)


@dataclass(frozen=True, slots=True)
class Cadence:
    """When an algorithm exchanges: at the steps of any of its beats.

    Several beats are those of several phases, of fragments that take turns, or of parameters of different kinds.
    """

    beats: tuple[Beat, ...] = (Beat(),)
    lag: int = 0
    """How many steps longer than one an exchange of weights may take before it is waited for; then ranks need not be at the
    same step."""
    late: bool = False
    """The result of an exchange of weights is added after the next update, not before it."""
    parts: int = 1
    """Into how many even parts the weights are cut."""

    def due(self, step: int) -> bool:
        """Whether anything is exchanged at ``step``; if not, gradients or weights stay this worker's own."""
        return any(beat.due(step) for beat in self.beats)

    def averages(self, step: int) -> bool:
        """Whether anything is averaged at ``step``, and not only taken over from the phase before."""
        return any(beat.due(step) and not beat.once for beat in self.beats)

    def ended(self, step: int) -> bool:
        """Whether nothing is averaged, or taken over, from ``step`` on."""
        return all(beat.first < step if beat.once else beat.until <= step for beat in self.beats)

    @property
    def every_step(self) -> bool:
        """Whether something is exchanged at every step."""
        return any(beat.every == 1 and beat.runs(0) and beat.until == math.inf and not beat.once for beat in self.beats)

    def runs(self, step: int) -> bool:
        """Whether ``step`` is within the time of any beat."""
        return any(beat.runs(step) for beat in self.beats)

    def ahead(self, step: int) -> float:
        """By how many updates the weights sent after ``step`` are extrapolated."""
        return max((beat.ahead for beat in self.beats if beat.runs(step)), default=0.0)

    def delay(self, step: int) -> int:
        """How many steps after ``step`` the result of its exchange of weights is added: the least of the beats then due."""
        return min((beat.delay for beat in self.beats if beat.due(step)), default=1)

    def merge(self, step: int) -> float | None:
        """The share of the weights of then that is kept where the result of the exchange after ``step`` is added. What is taken
        over from the phase before is added whole."""
        due = [beat for beat in self.beats if beat.due(step)]
        return None if any(beat.once for beat in due) else next((beat.merge for beat in due), None)

    @property
    def delays(self) -> frozenset[int]:
        """All of these numbers."""
        return frozenset(beat.delay for beat in self.beats if not beat.once)

    @property
    def most_ahead(self) -> float:
        """The largest of these numbers, of all steps."""
        return max((beat.ahead for beat in self.beats), default=0.0)

    @property
    def changes(self) -> frozenset[int]:
        """The steps at which the time of a beat begins or ends."""
        ends = {int(beat.until) for beat in self.beats if beat.until < math.inf and not beat.once}
        return frozenset({beat.first for beat in self.beats} | ends) - {0}

    @property
    def period(self) -> int:
        """After how many steps bytes and messages repeat."""
        return math.lcm(*(beat.every * beat.exchanges for beat in self.beats))

    def cycle(self, world: int, nodes: int) -> int:
        """After how many steps ``world`` ranks on so many nodes have the same partners again, so that as much leaves a node
        as before. Of partners that are drawn at random: how many steps belong together."""
        return math.lcm(*(beat.cycle(world, nodes) for beat in self.beats))

    def step_of(self, exchange: int) -> int:
        """The step of the exchange of this number (0, 1, …) of the first beat, where none takes longer than it should."""
        beat = self.beats[0]
        return beat.first + (beat.offset - beat.first) % beat.every + exchange * beat.every

    def during(self, first: int, until: float) -> "Cadence":
        """The same, from ``first`` to before ``until`` only."""
        clipped = [replace(beat, first=max(beat.first, first), until=min(beat.until, until)) for beat in self.beats]
        return replace(self, beats=tuple(beat for beat in clipped if beat.first < beat.until))

    @property
    def spacing(self) -> int:
        """The steps between two exchanges."""
        return min((beat.every for beat in self.beats), default=1)

    def in_parts(self, count: int, part: int | None, strides: int = 1, spacing: int | None = None) -> "Cadence":
        """The same for each of ``count`` fragments in turn, evenly spaced; or for one of them. The exchanges of one fragment
        take the steps of ``count`` times as many. A fragment is made of ``strides`` parts of the weights."""
        numbers, apart = range(count) if part is None else (part,), spacing or self.spacing
        beats = [
            replace(beat, every=beat.every * count, offset=beat.offset * count + number * apart)
            for beat in self.beats
            for number in numbers
        ]
        return replace(self, beats=tuple(beats), parts=count * strides)


NEVER = Cadence(())
"""That of an algorithm that exchanges nothing."""


def every(steps: int, *, lag: int = 0, late: bool = False, **beat: Any) -> Cadence:
    """An exchange after every so many ``steps``; ``beat``: more fields of its :class:`Beat`."""
    return Cadence((Beat(every=steps, **beat),), lag, late)


def joined(cadences: Iterable[Cadence]) -> Cadence:
    """The cadence of an algorithm that is made of those with ``cadences``."""
    each = list(cadences)
    return Cadence(
        tuple(dict.fromkeys(beat for one in each for beat in one.beats)),
        max((one.lag for one in each), default=0),
        any(one.late for one in each),
        max((one.parts for one in each), default=1),
    )
