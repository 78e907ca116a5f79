"""Network: what a case runs on, as a user writes it: ``200mbit``, ``50mbit+2ms``, ``200mbit/slow-link=50mbit/slow-host=2x``."""

import re
from dataclasses import dataclass

from gossamer.errors import ConfigurationError
from gossamer.lab import LabSpec

_FORM = "a network is a rate, then if you like +LATENCY, /slow-link=RATE, /slow-host=FACTORx, as in 200mbit+2ms/slow-host=2x"
_FACTOR = re.compile(r"(\d+(?:\.\d+)?)x")
_PARTS = ("slow-link", "slow-host")


@dataclass(frozen=True, slots=True)
class Network:
    """``slow_link``: the rate of the last host's link, both ways. ``slow_host``: how many times longer its compute takes."""

    rate: str
    latency: str = "0"
    slow_link: str | None = None
    slow_host: float | None = None

    def spec(self, hosts: int, waits: bool) -> LabSpec:
        """The emulated hosts. Raises ConfigurationError for what the lab cannot make.

        ``waits``: compute is emulated by waiting, which a slow host does longer, as a slow accelerator would. Otherwise
        its processes are stopped for the rest of the time, and with them what they send and receive.
        """
        last = hosts - 1
        if hosts < 2 and (self.slow_link or self.slow_host):
            raise ConfigurationError("one slow host or link needs others beside it: take 2 hosts or more")
        return LabSpec(
            hosts=hosts,
            rate=self.rate,
            latency=self.latency,
            slow={last: self.slow_host} if self.slow_host else {},
            slow_by="telling" if waits else "stopping",
            slow_links={last: self.slow_link} if self.slow_link else {},
        )


def parse_network(text: str) -> Network:
    """Read a network. Raises ConfigurationError for anything else, with what was expected."""
    line, *parts = text.strip().split("/")
    rate, plus, latency = line.partition("+")
    named = dict(_named(text, part) for part in parts)
    if len(named) < len(parts) or not rate or (plus and not latency):
        raise ConfigurationError(f"{text!r}: {_FORM}")
    factor = named.get("slow-host")
    return Network(rate, latency or "0", named.get("slow-link"), None if factor is None else _factor(text, factor))


def _named(text: str, part: str) -> tuple[str, str]:
    name, _, value = part.partition("=")
    if name not in _PARTS or not value:
        raise ConfigurationError(f"{text!r}: {part!r} is neither slow-link=RATE nor slow-host=FACTORx; {_FORM}")
    return name, value


def _factor(text: str, factor: str) -> float:
    match = _FACTOR.fullmatch(factor)
    if match is None or not 1 < float(match[1]) <= 100:
        raise ConfigurationError(f"{text!r}: {factor!r} is no factor of a slow host; write slow-host=2x, up to 100x")
    return float(match[1])
