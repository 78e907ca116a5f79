"""Replay: a recorded program carried out by all workers, each with its own clock, in arrays.

An operation ends for a worker when the last worker that it waits for has begun it, and its duration has passed: of a
collective operation all members, of a permutation the worker itself, whom it receives from, and whom it sends to. What
operations lose to each other on a link is that of the recorded run.
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.comm.ops import Broadcast, Op, Permute, Push
from gossamer.simulate.program import Computed, FlowRecord, Operation, Program, Submitted, Waited

Times = npt.NDArray[np.float64]
"""One moment, or one duration, of each worker."""

Ranks = npt.NDArray[np.int64]
Latest = Callable[[Times], Times]
"""Of each worker's number the largest among the workers that it waits for, itself included; along the last axis."""


@dataclass(frozen=True)
class Draw:
    """What a step is for each worker: by which ``factor`` it computes longer than recorded, and ``more`` seconds of it."""

    factor: Times
    more: Times | float = 0.0


class Workers:
    """The clocks of ``world`` workers that carry out one program, again and again.

    ``seconds``: of an operation, how long it lasts on each worker's own link; by default as long as recorded.
    """

    def __init__(
        self,
        program: Program,
        world: int,
        seconds: Callable[[Operation], Times] | None = None,
    ) -> None:
        self.now: Times = np.zeros(world)
        self._seconds = seconds
        self._free: dict[int, Times] = {}
        self._program = program
        backs = (each.back for step in program for each in step if isinstance(each, Waited))
        self._ends: deque[Times] = deque(maxlen=max(backs, default=1))
        """Of the last flows, as many as are waited for."""
        self._later: deque[tuple[int, Times]] = deque()
        self._step = 0
        self._latest: dict[int, Latest] = {}
        self._known: dict[int, tuple[Operation, list[Ranks] | None, list[Times] | float]] = {}

    def take(self, draw: Draw) -> None:
        """Carry out one step."""
        more = draw.more
        for each in self._program[self._step % len(self._program)]:
            if isinstance(each, Computed):
                self.now = self.now + (draw.factor * each.seconds + (each.elapsed - each.seconds)) + more
                more = 0.0
            elif isinstance(each, Submitted):
                self._submit(each.flow)
            elif each.back <= len(self._ends):
                self._later.append((self._step + each.late, self._ends[-each.back]))
                self._wait()
        self._step += 1

    def _wait(self) -> None:
        while self._later and self._later[0][0] <= self._step:
            self.now = np.maximum(self.now, self._later.popleft()[1])

    def _submit(self, flow: FlowRecord) -> None:
        free = self._free.get(flow.lane)
        end = self._carried_out(flow, self.now if free is None else np.maximum(self.now, free))
        self._free[flow.lane] = end
        self._ends.append(end)

    def _carried_out(self, flow: FlowRecord, begin: Times) -> Times:
        """When a flow ends that begins then."""
        now: Times = begin
        ends: list[Times] = []
        for kind, value in flow.actions:
            if kind == "work":
                now = now + value
            elif kind == "start":
                ends.append(self._end(flow.operations[int(value)], now))
            else:
                now = np.maximum(now, ends[int(value)])
        return now

    def _end(self, operation: Operation, begun: Times) -> Times:
        """When an operation ends for those who begin it then; for those who take no part, then."""
        if not operation.sent:
            return begun
        _, rows, seconds = self._known.get(id(operation)) or self._meet(operation)
        latest = self._latest_of(operation.op)
        if rows is None:
            return latest(begun) + (seconds if isinstance(seconds, float) else seconds[0])
        end = begun.copy()
        for number, members in enumerate(rows):
            end[members] = latest(begun[members]) + (seconds if isinstance(seconds, float) else seconds[number])
        return end

    def _meet(self, operation: Operation) -> tuple[Operation, list[Ranks] | None, list[Times] | float]:
        """Who takes part together (a row each; groups of one size in one array), and for how long."""
        group, rows = operation.group, None
        if group is not None:
            size, world = len(group), len(self.now)
            alike = group == tuple(range(size))  # as many ranks as on rank 0's machine, on every other one
            groups = consecutive(world, size) if alike else (group,)
            lengths = sorted({len(each) for each in groups})
            rows = [np.array(sorted(each for each in groups if len(each) == length)) for length in lengths]
        seconds: list[Times] | float = operation.seconds
        if self._seconds is not None:
            own, latest = self._seconds(operation), self._latest_of(operation.op)
            seconds = [latest(own)] if rows is None else [latest(own[members]) for members in rows]
        self._known[id(operation)] = operation, rows, seconds
        return self._known[id(operation)]

    def _latest_of(self, op: Op) -> Latest:
        """By the pattern of an operation, which many share."""
        pattern = op.permutation if isinstance(op, Permute) else op.graph if isinstance(op, Push) else None
        if pattern is None:
            return _latest(op)
        if id(pattern) not in self._latest:
            self._latest[id(pattern)] = _latest(op)
        return self._latest[id(pattern)]


def _latest(op: Op) -> Latest:
    if isinstance(op, Permute):
        to = np.array(op.permutation.to)
        source = np.empty_like(to)
        source[to] = np.arange(len(to))
        return lambda begun: np.maximum(begun, np.maximum(begun[..., source], begun[..., to]))
    if isinstance(op, Push):
        return _along(np.array([(rank, to) for rank, targets in enumerate(op.graph.to) for to in targets]).reshape(-1, 2))
    if isinstance(op, Broadcast):
        root = op.source
        return lambda begun: np.maximum(begun, begun[..., root, None])
    return lambda begun: np.broadcast_to(begun.max(axis=-1, keepdims=True), begun.shape)


def _along(edges: Ranks) -> Latest:
    def latest(begun: Times) -> Times:
        there, by_rank = begun.copy(), np.moveaxis(begun, -1, 0)  # an array that is written through has ranks first
        written = np.moveaxis(there, -1, 0)
        np.maximum.at(written, edges[:, 1], by_rank[edges[:, 0]])
        np.maximum.at(written, edges[:, 0], by_rank[edges[:, 1]])
        return there

    return latest


def mean_step(workers: Workers, draws: Iterable[Draw], first: int) -> float:
    """Seconds per step, in the mean over workers and over the steps after the ``first`` ones."""
    begin, number = 0.0, 0
    for number, draw in enumerate(draws, start=1):
        workers.take(draw)
        if number == first:
            begin = float(workers.now.mean())
    return (float(workers.now.mean()) - begin) / (number - first)
