"""Answering: what a rank that waits for samples does meanwhile for ranks that wait for its weights."""

from collections.abc import Callable
from typing import Protocol

from gossamer.engine.lagging import after_grace


class Answering(Protocol):
    """A :class:`gossamer.Replica`, as far as a shuffle knows of it."""

    def answer(self) -> bool:
        """Take part in one more exchange that others may wait for, if it could begin without waiting; whether it did."""


def answering(replica: Answering) -> Callable[[], bool]:
    """What to do during a wait. It is not what is waited for: the wait ends with its timeout all the same."""
    answer = after_grace(replica.answer)

    def meanwhile() -> bool:
        answer()
        return False

    return meanwhile
