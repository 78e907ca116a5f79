"""Clock: moments of the host, or of a device, which does things later than they are launched."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """Tells moments; what lies between two of them is known once everything is finished."""

    def now(self) -> Any:
        """This moment: on a device, the one at which it will have done all that was launched on the current stream."""

    def seconds(self, begin: Any, end: Any) -> float:
        """From one moment to another."""

    def finish(self) -> None:
        """Wait until everything that was launched is done."""


class HostClock:
    """Moments at which the host does something."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin

    def finish(self) -> None:
        return None


class DeviceClock:
    """Events on the streams of a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def now(self) -> Any:
        event = torch.Event(self._device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        milliseconds: float = begin.elapsed_time(end)
        return milliseconds / 1000

    def finish(self) -> None:
        torch.accelerator.synchronize(self._device)


def clock_for(device: torch.device) -> Clock:
    """The clock for what is computed on a device."""
    return HostClock() if device.type in ("cpu", "meta") else DeviceClock(device)
