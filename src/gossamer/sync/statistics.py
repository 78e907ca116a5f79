"""Statistics: what a replica counts about its own communication."""

import math
import time
from collections.abc import Iterator, Sequence
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

    def read(self, step: int, exchanged_bytes: int, shares: Sequence[tuple[float, float]]) -> dict[str, float]:
        """All counters, cumulative since the start: bytes, messages, seconds; and how much the algorithm saves and owes.

        ``exchanged_bytes``: before any encoding. ``shares``: see ``Exchange.residual_share``.
        """
        meters = self.runner.meters()
        wire, sent = sum(meter.wire_seconds for meter in meters), sum(meter.bytes for meter in meters)
        world = self.runner.world
        exact = 2 * (world - 1) / world * exchanged_bytes
        owed, held = sum(owed for owed, _ in shares), sum(held for _, held in shares)
        return {
            "step": step,
            "bytes_sent": sent,
            "compression_ratio": exact / sent if sent else 1.0,
            "residual_norm": math.sqrt(owed / held) if held else 0.0,
            "messages_sent": sum(meter.messages for meter in meters),
            "exposed_seconds": self.exposed_seconds,
            "wire_seconds": wire,
            # Each by itself: a lane that waits at the moment has counted that, and not yet the time of its flow.
            "local_seconds": sum(max(0.0, meter.busy_seconds - meter.wire_seconds) for meter in meters),
            "elapsed_seconds": time.perf_counter() - self._begun,
        }
