"""Statistics: what a replica counts about its own communication."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from gossamer.comm.runner import Runner


@dataclass
class Statistics:
    """Counters of one replica on this rank. ``exposed_seconds``: the training loop stood still for communication."""

    runner: Runner
    exposed_seconds: float = 0.0
    _begun: float = field(default_factory=time.perf_counter)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count the time inside as exposed."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.exposed_seconds += time.perf_counter() - begin

    def read(self, step: int) -> dict[str, float]:
        """All counters, cumulative since the start: bytes, messages, seconds."""
        meters = self.runner.meters()
        wire = sum(meter.wire_seconds for meter in meters)
        return {
            "step": step,
            "bytes_sent": sum(meter.bytes for meter in meters),
            "messages_sent": sum(meter.messages for meter in meters),
            "exposed_seconds": self.exposed_seconds,
            "wire_seconds": wire,
            "local_seconds": max(0.0, sum(meter.busy_seconds for meter in meters) - wire),
            "elapsed_seconds": time.perf_counter() - self._begun,
        }
