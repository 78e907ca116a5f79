"""Lab specification: the emulated hosts and their network, checked when it is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from gossamer.lab.rates import Rate, parse_duration, parse_rate

Shaping = Literal["auto", "namespaces", "runner", "none"]

MAX_HOSTS = 250  # the addresses of one /24, less a few


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """Emulated hosts and the network between them.

    `rate` is one rate for all hosts or one per host (`"200mbit"`, `"200mbit,50mbit"`, `["200mbit", "50mbit"]`).
    `latency` is added to every packet, one way (`"2ms"`). `slow` maps a host to the factor by which its processes
    are slowed. `timeout` is in seconds, for the whole run. A field that is out of range raises ValueError.
    """

    hosts: int
    rate: str | Sequence[str] = "unshaped"
    procs_per_host: int = 1
    latency: str = "0"
    slow: Mapping[int, float] = field(default_factory=dict)
    shaping: Shaping = "auto"
    timeout: float | None = None

    def __post_init__(self) -> None:
        _whole("hosts", self.hosts, 1, MAX_HOSTS)
        _whole("procs_per_host", self.procs_per_host, 1, 1024)
        if self.shaping not in get_args(Shaping):
            raise ValueError(f"shaping is {self.shaping!r}: it must be one of {', '.join(get_args(Shaping))}")
        if self.timeout is not None and not 0 < self.timeout < math.inf:
            raise ValueError(f"timeout is {self.timeout}: it must be a positive number of seconds")
        for host, factor in self.slow.items():
            self._check_slow(host, factor)
        self.rates, self.latency_s  # noqa: B018  (reading them checks them)

    @property
    def world(self) -> int:
        """Number of processes on all hosts together."""
        return self.hosts * self.procs_per_host

    @property
    def rates(self) -> tuple[Rate, ...]:
        """One rate per host."""
        texts = self.rate.split(",") if isinstance(self.rate, str) else list(self.rate)
        if len(texts) not in (1, self.hosts):
            raise ValueError(f"{len(texts)} rates for {self.hosts} hosts: give one rate, or one per host")
        return tuple(parse_rate(text) for text in texts) * (self.hosts if len(texts) == 1 else 1)

    @property
    def latency_s(self) -> float:
        """Added one-way latency in seconds."""
        return parse_duration(self.latency)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        return values | {"rate": [rate.text for rate in self.rates], "slow": list(self.slow.items())}

    @staticmethod
    def from_json(values: dict[str, Any]) -> LabSpec:
        """The inverse of `to_json`."""
        return LabSpec(**values | {"slow": dict(values["slow"])})

    def _check_slow(self, host: int, factor: float) -> None:
        if host not in range(self.hosts):
            raise ValueError(f"slow names host {host}: hosts are 0 to {self.hosts - 1}")
        if not 1 <= factor <= 100:
            raise ValueError(f"host {host} is slowed by {factor}: the factor must be from 1 to 100")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}: it must be a whole number from {low} to {high}")
