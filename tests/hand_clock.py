"""A clock moved by hand: what waits on it waits exactly as long as it asked for, however busy the machine is."""

from types import ModuleType

import pytest


class HandClock:
    """Stands for the module ``time``: it stands still, except while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0

    def perf_counter(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def set_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> HandClock:
    """Let some modules live by a clock that a test moves."""
    clock = HandClock()
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
    return clock
