"""Links: their goodput and latency, measured through the runner by the operations that exchanges are made of.

Note [one figure on every rank]: every duration is that of the slowest rank, from a barrier on, so that a late rank is not taken
for a slow link; it is exchanged before it is used. So all ranks find the same figures, choose the same sizes, and end together.
"""

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from gossamer.comm.ops import AllReduce, AllToAll, Flow, Group, Op, Permute, maximum, perform, within
from gossamer.comm.runner import Runner
from gossamer.comm.topology import shift
from gossamer.simulate.profile import Link

Pattern = Literal["pair", "ring", "all"]
"""One message to another rank; a ring all-reduce; a part to each of all."""

SECONDS = 10.0
"""What all measuring may take."""

_LONG = 0.2
"""Seconds of the longer transfer of each pattern. Its quarter is the shorter one: the difference of both is without latencies
and without what a token bucket lets through at first."""
_SMALL, _FIRST, _MOST = 2**12, 2**16, 2**25
"""Bytes of the message by which latency is told, of the first longer one, and of the longest."""


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What a pattern found: ``goodput`` in bits per second of payload, ``latency`` in seconds, one way. ``note``: how, where it
    was not measured as usual."""

    goodput: float
    latency: float
    note: str = ""

    @property
    def link(self) -> Link:
        """As a prediction takes it."""
        return Link(bandwidth=self.goodput, latency=self.latency)


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Those of one kind of link, by pattern."""

    pair: Rate
    ring: Rate
    all: Rate

    def scaled(self, factor: float) -> "Rates":
        """The same, of links ``factor`` times as fast."""
        return Rates(**{name: replace(getattr(self, name), goodput=factor * getattr(self, name).goodput) for name in PATTERNS})


PATTERNS: tuple[Pattern, ...] = get_args(Pattern)


class Stopwatch:
    """Durations that all ranks agree on, and how much time is left. Collective. ``device``: where the tensors lie."""

    def __init__(self, runner: Runner, seconds: float = SECONDS, device: torch.device | None = None) -> None:
        self.left = seconds
        """Seconds that are left, the same on all ranks."""
        self.device = device or torch.device("cpu")
        self._runner, self._seconds, self._begin = runner, seconds, runner.now()

    def time(self, action: Callable[[], object], what: str) -> float:
        """Seconds of the slowest rank for ``action``, from a moment at which all are there."""
        runner = self._runner
        runner.run(lambda: maximum(torch.zeros(1), runner.world), f"the barrier before {what}")
        begin = runner.now()
        action()
        wait_for(self.device)
        now = runner.now()
        mine = torch.tensor([now - begin, now - self._begin], dtype=torch.float64)
        slowest = runner.run(lambda: maximum(mine, runner.world), f"the durations of {what}").tolist()
        self.left = self._seconds - slowest[1]
        return float(slowest[0])


def wait_for(device: torch.device) -> None:
    """Until a device has done what it was given."""
    if device.type not in ("cpu", "meta"):
        torch.accelerator.synchronize(device)


def between(nodes: tuple[Group, ...]) -> tuple[Group, ...]:
    """One rank of each node: who measures the links between nodes."""
    return (tuple(node[0] for node in nodes),)


def measure_rates(runner: Runner, groups: tuple[Group, ...], watch: Stopwatch, what: str) -> Rates:
    """What the links among each of ``groups`` do, all of them measured concurrently. Collective; ranks of no group wait.

    Of patterns for which no time is left the rate of another one is taken, and the note says so.
    """
    found: dict[str, Rate] = {}
    for number, pattern in enumerate(PATTERNS):
        share = watch.left / (len(PATTERNS) - number)
        meter = _Meter(runner, groups, watch, pattern, what)
        found[pattern] = meter.rate(share) if share > 0 or not found else _instead(found, pattern)
    return Rates(**found)


def _instead(found: dict[str, Rate], pattern: str) -> Rate:
    other = next(iter(found))
    return replace(found[other], note=f"not measured, no time was left: taken from {other}")


class _Meter:
    """One pattern among some groups."""

    def __init__(self, runner: Runner, groups: tuple[Group, ...], watch: Stopwatch, pattern: Pattern, what: str) -> None:
        self._runner, self._watch, self._pattern, self._what = runner, watch, pattern, what
        self._group = next((group for group in groups if runner.rank in group), None)
        self._most = max(map(len, groups))

    def rate(self, seconds: float) -> Rate:
        """Goodput and latency, found in about so many seconds; in one small message if that takes longer."""
        begin = self._watch.left
        first = self._time(_SMALL)
        small = min(first, self._time(_SMALL), self._time(_SMALL)) if first < seconds / 8 else first
        rounds = max(1, self._operation(_SMALL).traffic(self._most).rounds)
        if small > seconds / 4:
            return self._by_one(_SMALL, small, "measured by a message of 4 KiB only: a longer one would have taken too long")
        long, nbytes = self._time(_FIRST), _FIRST
        while long < _LONG / 2 and nbytes < _MOST and 4 * self._grown(long, nbytes) < seconds - (begin - self._watch.left):
            nbytes = self._following(long, nbytes)
            long = self._time(nbytes)
        if begin - self._watch.left + 2 * long > seconds:
            return self._by_one(nbytes, long, f"measured by one message of {nbytes} bytes: no time was left for a second")
        short = self._time(nbytes // 4)
        goodput = 8 * (self._volume(nbytes) - self._volume(nbytes // 4)) / max(min(long, self._time(nbytes)) - short, 1e-9)
        most = 8 * self._volume(nbytes) / max(long - small, 1e-9)  # noise may make the difference of both too small
        return Rate(goodput=min(goodput, 2 * most), latency=small / rounds)

    def _by_one(self, nbytes: int, seconds: float, note: str) -> Rate:
        return Rate(goodput=8 * self._volume(nbytes) / seconds, latency=0.0, note=note)

    def _grown(self, seconds: float, nbytes: int) -> float:
        """What the following size takes at most."""
        return seconds * self._following(seconds, nbytes) / nbytes

    @staticmethod
    def _following(seconds: float, nbytes: int) -> int:
        """Bytes that are expected to take as long as they should; at most 16 times as many."""
        factor = min(16.0, max(2.0, _LONG / max(seconds, 1e-9)))
        return min(_MOST, 1 << math.floor(math.log2(nbytes * factor)))

    def _volume(self, nbytes: int) -> int:
        """Bytes that the busiest rank hands to the link."""
        return self._operation(nbytes).traffic(self._most).bytes

    def _time(self, nbytes: int) -> float:
        flow = self._flow(self._operation(nbytes)) if self._group is not None else None
        label = f"the measurement of links {self._what} ({self._pattern}, {nbytes} bytes)"
        return self._watch.time(lambda: self._runner.run(lambda: _nothing() if flow is None else flow, label, 0), label)

    def _operation(self, nbytes: int) -> Op:
        return operation(self._pattern, nbytes, len(self._group or range(self._most)), self._watch.device)

    def _flow(self, op: Op) -> Flow[Tensor]:
        assert self._group is not None
        return within(perform(op), self._group)


def operation(pattern: Pattern, nbytes: int, ranks: int, device: torch.device) -> Op:
    """An operation of this pattern over so many bytes on each of ``ranks`` ranks."""
    numbers = max(ranks, nbytes // 4 // ranks * ranks)
    tensor = torch.ones(numbers, device=device)
    if pattern == "pair":
        return Permute(tensor, shift(1 % ranks, ranks))
    return AllReduce(tensor) if pattern == "ring" else AllToAll(tensor.view(ranks, -1))


def _nothing() -> Generator[Any, Any, None]:
    """The flow of a rank that takes no part."""
    yield from ()
