"""Which errors of a rank the other ranks are told of, and in which words."""

import pytest

from gossamer.comm.loopback import InlineRunner, LocalPort
from gossamer.comm.runner import Meter, alarming, in_words
from gossamer.errors import CommunicationError, ConfigurationError, UsageError


class Alarmed(InlineRunner):
    """One rank that keeps what it would tell the others."""

    def __init__(self) -> None:
        super().__init__(LocalPort(Meter()), Meter())
        self.alarms: list[str] = []

    def alarm(self, message: str) -> None:
        self.alarms.append(message)


def test_own_errors_are_told_and_errors_of_communication_are_not() -> None:
    runner = Alarmed()
    for error in (UsageError("a"), ValueError("b"), CommunicationError("c"), KeyboardInterrupt()):
        with pytest.raises(type(error)), alarming(runner):
            raise error
    assert runner.alarms == ["a", "rank 0: ValueError: b"]


def test_what_ends_a_rank_in_words() -> None:
    assert in_words(2, ConfigurationError("rank 2: a field")) == "rank 2: a field"
    assert in_words(2, MemoryError("of 3 GB")) == "rank 2: MemoryError: of 3 GB"
    assert in_words(2, KeyboardInterrupt()) == "rank 2: KeyboardInterrupt"
