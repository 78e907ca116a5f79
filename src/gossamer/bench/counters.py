"""Counters: what steps cost one rank besides time: processor, bytes on the interface, payload, waiting in the open."""

import os
import resource
from dataclasses import astuple, dataclass
from pathlib import Path

from gossamer.replica import Replica

_INTERFACES = Path("/proc/self/net/dev")


@dataclass(frozen=True, slots=True)
class Counters:
    """Readings of one moment, or their growth per step.

    ``cpu_seconds``: of all threads of this process. ``interface_bytes``: see the function of this name. The others
    are gossamer's own, 0 without it: ``exposed_seconds`` (the loop stood still) and ``wire_seconds`` (its lanes waited for
    the network).
    """

    cpu_seconds: float
    interface_bytes: float
    exposed_seconds: float
    wire_seconds: float

    @staticmethod
    def read(replica: Replica | None) -> "Counters":
        """The readings of now."""
        own = replica.metrics() if replica is not None else {}
        usage = resource.getrusage(resource.RUSAGE_SELF)
        exposed, wire = own.get("exposed_seconds", 0.0), own.get("wire_seconds", 0.0)
        return Counters(usage.ru_utime + usage.ru_stime, interface_bytes(), exposed, wire)

    def per_step(self, before: "Counters", steps: int) -> "Counters":
        """The growth since ``before``, divided by the number of steps."""
        return Counters(*((now - then) / steps for now, then in zip(astuple(self), astuple(before), strict=True)))


def interface_bytes() -> float:
    """Bytes that this host (in the lab: the emulated one) has sent, headers included, divided by its workers.

    Over the interfaces that ``GLOO_SOCKET_IFNAME`` names, otherwise over all, where what a bond or a bridge sends counts twice,
    and other traffic too; without the loopback. 0 where there is no such count.
    """
    if not _INTERFACES.exists():
        return 0.0
    named = os.environ.get("GLOO_SOCKET_IFNAME", "")
    rows = (line.split(":", 1) for line in _INTERFACES.read_text().splitlines()[2:])
    sent = {name.strip(): int(counts.split()[8]) for name, counts in rows}
    chosen = {*(named.split(",") if named else sent)} - {"lo"}
    return sum(nbytes for name, nbytes in sent.items() if name in chosen) / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
