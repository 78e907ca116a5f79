"""Finishing: the flows that finish a step while the next one begins, and what they write."""

from collections.abc import Iterable
from typing import Any

from gossamer.comm.ops import Flow
from gossamer.comm.runner import CONTROL, Runner, Ticket
from gossamer.state import State


class Finishing:
    """Flows that are under way on the control lane, and the states that take what they write."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner
        self._flows: list[tuple[Ticket[None], list[tuple[State, State]]]] = []

    def __bool__(self) -> bool:
        return bool(self._flows)

    def begin(self, flow: Flow[Any], label: str, states: Iterable[tuple[State, State]]) -> None:
        """Start ``flow``; ``states``: each that takes what it writes, with the one that it writes to."""
        self._flows.append((self._runner.submit(lambda: flow, label, CONTROL), list(states)))

    def complete(self) -> None:
        """Wait for all of them, and keep what they wrote."""
        flows, self._flows = self._flows, []
        for ticket, states in flows:
            self._runner.wait(ticket)
            for state, later in states:
                state.take(later)

    def drop(self) -> None:
        """Keep nothing of what they write."""
        self._flows = [(ticket, []) for ticket, _ in self._flows]
