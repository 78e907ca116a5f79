"""Shaper: a line rate and a latency enforced inside the runner, for places without network namespaces or netem."""

import math
import os
import threading
import time
from dataclasses import dataclass, field

from gossamer.comm.operations import Traffic


@dataclass
class Shaper:
    """Delays the completion of operations as a link of ``rate`` bits per second and ``latency`` seconds would.

    The lanes of one rank share the link: payloads queue behind each other, latencies overlap. Only traffic of
    gossamer's own runner is delayed; nothing else on the machine is.
    """

    rate: float = float("inf")
    latency: float = 0.0
    _free: float = field(default=0.0, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)

    def due(self, traffic: Traffic, now: float) -> float:
        """The time at which an operation handed over at ``now`` may complete."""
        with self._lock:
            self._free = max(self._free, now) + 8 * traffic.bytes / self.rate
            return self._free + self.latency * traffic.rounds

    def after(self, traffic: Traffic) -> float:
        """Seconds to add to an operation's end where something else keeps the rate; else 0, for :meth:`due` has them."""
        return self.latency * traffic.rounds if math.isinf(self.rate) else 0.0

    @staticmethod
    def sleep_until(moment: float) -> None:
        """Sleep until a time of ``time.perf_counter``."""
        remaining = moment - time.perf_counter()
        if remaining > 0:
            time.sleep(remaining)


def shaper_from_environment() -> Shaper | None:
    """The shaper that ``gossamer lab`` asks for through the environment, or None.

    Ranks of one host have equal shares of its rate, each for all that it sends. The names are those of
    ``gossamer.lab.environment``, which imports no torch and so nothing from here, nor this from there.
    """
    rate, latency = os.environ.get("GOSSAMER_LAB_RATE_BPS"), os.environ.get("GOSSAMER_LAB_LATENCY_S")
    if not rate and not latency:
        return None
    share = float(rate or "inf") / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return Shaper(share, float(latency or 0.0))
