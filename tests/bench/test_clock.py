"""Clocks: a device is timed by its own events, for it does things later than they are launched."""

from typing import Any

import pytest
import torch

from benchmarks.studies.harness import seconds_of
from gossamer.bench import bound, clock
from gossamer.bench.catalogue import find_workload
from gossamer.bench.clock import DeviceClock, HostClock, clock_for


class Device:
    """Works for a second on whatever is launched; the host goes on immediately. Its moments are known when it has finished."""

    def __init__(self) -> None:
        self.launched, self.finished, self.finishes = 0, 0, 0

    def now(self) -> int:
        self.launched += 1
        return self.launched

    def seconds(self, begin: int, end: int) -> float:
        assert max(begin, end) <= self.finished, "asked before the device has finished"
        return float(end - begin)

    def finish(self) -> None:
        self.finished, self.finishes = self.launched, self.finishes + 1


def test_a_batch_is_launched_without_waiting_in_between() -> None:
    device = Device()

    def work() -> None:
        device.launched += 1

    assert seconds_of(work, device, calls=9) == pytest.approx(10 / 9)
    assert device.finishes == 2


def test_gradients_are_ready_when_the_device_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(bound, "clock_for", lambda where: device)
    ready = bound.measure_ready(find_workload("Convnet(0.01)"), repeats=1, forward=True)
    # One moment for each of the four layers, then one for each of their eight gradients, then the end.
    assert ready.used == (4, 4, 3, 3, 2, 2, 1, 1)
    assert ready.seconds == tuple(range(5, 13))
    assert ready.step == 13.0


def test_each_kind_of_device_has_its_clock() -> None:
    assert isinstance(clock_for(torch.device("cpu")), HostClock)
    assert isinstance(clock_for(torch.device("cuda", 0)), DeviceClock)


def test_a_device_is_timed_by_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        def __init__(self, device: Any, enable_timing: bool) -> None:
            assert enable_timing
            self.stream: Any = None

        def record(self, stream: Any) -> None:
            self.stream = stream

        def elapsed_time(self, end: "Event") -> float:
            return 1000.0 * (end.stream - self.stream)

    streams = iter([3, 5])
    monkeypatch.setattr(clock.torch, "Event", Event)
    monkeypatch.setattr(clock.torch.accelerator, "current_stream", lambda device: next(streams))
    device = DeviceClock(torch.device("cuda", 0))
    assert device.seconds(device.now(), device.now()) == 2.0
