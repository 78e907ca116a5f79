"""Breaking: carries out a run's faults, each at its time."""

from __future__ import annotations

import heapq
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from gossamer.lab import network
from gossamer.lab.faults import OF_RANKS, Fault
from gossamer.lab.processes import RankProcess
from gossamer.lab.spec import LabSpec


class Breaker:
    """The faults that are still to come, and the ends of temporary ones."""

    def __init__(self, spec: LabSpec, namespaces: Sequence[int | None], ranks: list[RankProcess], report: Callable[..., None]):
        """`ranks`: the supervisor's own list, in which a rank that is started again takes the place of the old one."""
        self._rates, self._namespaces, self._ranks, self._report = spec.rates, namespaces, ranks, report
        self._on_line = [fault for fault in spec.planned if fault.line is not None]
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0
        self._timed = [fault for fault in spec.planned if fault.at is not None]
        self.planned = bool(spec.planned)
        """Whether there is any: then no rank's end is a reason to end the others."""

    def begin(self, now: float) -> None:
        """The ranks are started: times count from here."""
        for fault in self._timed:
            self._schedule(now + (fault.at or 0.0), partial(self._break, fault, now + (fault.at or 0.0)))

    def saw(self, line: str, now: float) -> None:
        """A rank has written a line."""
        for fault in [fault for fault in self._on_line if fault.line is not None and fault.line in line]:
            self._on_line.remove(fault)
            self._schedule(now, partial(self._break, fault, now))

    def seconds_left(self, now: float) -> float | None:
        """Until something is due; None if nothing is waited for."""
        return max(0.0, self._due[0][0] - now) if self._due else None

    def carry_out(self, now: float) -> None:
        """Do what is due."""
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()

    def _schedule(self, when: float, action: Callable[[], None]) -> None:
        self._scheduled += 1  # so that actions are never compared
        heapq.heappush(self._due, (when, self._scheduled, action))

    def _break(self, fault: Fault, now: float) -> None:
        undo = self._begin(fault)
        self._report("note", f"fault: {fault}")
        if fault.seconds is not None and undo is not None:
            self._schedule(now + fault.seconds, partial(self._mend, fault, undo))

    def _mend(self, fault: Fault, undo: Callable[[], Any]) -> None:
        undo()
        self._report("note", f"end of fault: {fault}")

    def _begin(self, fault: Fault) -> Callable[[], Any] | None:
        """Cause a fault; what ends it, where it can end."""
        if fault.kind in OF_RANKS:
            return _break_rank(fault, self._ranks[fault.target])
        if fault.kind == "throttle":
            assert fault.rate is not None
            self._throttle(fault.target, fault.rate)
            return partial(self._throttle, fault.target, self._rates[fault.target])
        network.set_link(fault.target, up=False)
        if fault.kind == "cut":
            return partial(network.set_link, fault.target, up=True)
        for rank in self._ranks:
            if rank.host == fault.target:
                rank.broken = True
                rank.send(signal.SIGKILL)
        return None

    def _throttle(self, host: int, rate: Any) -> None:
        namespace = self._namespaces[host]
        assert namespace is not None
        network.throttle(namespace, host, rate)


def _break_rank(fault: Fault, rank: RankProcess) -> Callable[[], Any]:
    if fault.kind == "stop":
        rank.broken = fault.seconds is None
        rank.send(signal.SIGSTOP)
        return partial(rank.send, signal.SIGCONT)
    rank.broken, rank.restarts = fault.kind == "kill", fault.kind == "restart"
    rank.send(signal.SIGKILL)
    return lambda: None
