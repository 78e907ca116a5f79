"""Lab specification: the emulated hosts and their network, checked when it is written down."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, get_args

from gossamer.checks import is_number, is_whole
from gossamer.errors import ConfigurationError
from gossamer.lab.faults import OF_HOSTS, OF_RANKS, Fault, parse_fault
from gossamer.lab.rates import Rate, parse_duration, parse_rate

Shaping = Literal["auto", "namespaces", "runner", "none"]
Slowing = Literal["stopping", "telling"]

MAX_HOSTS = 250  # the addresses of one /24, less a few


@dataclass(frozen=True, kw_only=True)
class LabSpec:
    """Emulated hosts and the network between them.

    `rate` is one rate for all hosts or one per host (`"200mbit"`, `"200mbit,50mbit"`, `["200mbit", "50mbit"]`).
    `slow_links` maps a host to another rate of its link, both ways. `latency` is added to every packet, one way
    (`"2ms"`). `slow` maps a host to the factor by which its processes are slowed: by `"stopping"` them for the rest of
    the time, or by `"telling"` them, for scripts that emulate compute by waiting and read GOSSAMER_LAB_SLOWDOWN.
    `faults` are what breaks during the run (`"kill 2 @20s"`, see `faults.py`): all ranks then run to their own end.
    `timeout` is in seconds, for the whole run. A field that is out of range raises ConfigurationError.
    """

    hosts: int
    rate: str | Sequence[str] = "unshaped"
    procs_per_host: int = 1
    latency: str = "0"
    slow: Mapping[int, float] = field(default_factory=dict)
    slow_by: Slowing = "stopping"
    slow_links: Mapping[int, str] = field(default_factory=dict)
    faults: Sequence[str] = ()
    shaping: Shaping = "auto"
    timeout: float | None = None

    def __post_init__(self) -> None:
        _whole("hosts", self.hosts, 1, MAX_HOSTS)
        _whole("procs_per_host", self.procs_per_host, 1, 1024)
        _one_of("shaping", self.shaping, get_args(Shaping))
        _one_of("slow_by", self.slow_by, get_args(Slowing))
        if self.timeout is not None and not (is_number(self.timeout) and 0 < self.timeout < math.inf):
            raise ConfigurationError(f"timeout is {self.timeout!r}: it must be a positive number of seconds")
        for host, factor in self.slow.items():
            self._check_slow(host, factor)
        for host in self.slow_links:
            self._check_host("slow_links", host)
        for fault in self.planned:
            self._check_fault(fault)
        self.rates, self.latency_s  # noqa: B018  (reading them checks them)

    @property
    def world(self) -> int:
        """Number of processes on all hosts together."""
        return self.hosts * self.procs_per_host

    @property
    def rates(self) -> tuple[Rate, ...]:
        """One rate per host."""
        texts = self.rate.split(",") if isinstance(self.rate, str) else _listed(self.rate)
        if len(texts) not in (1, self.hosts):
            raise ConfigurationError(f"{len(texts)} rates for {self.hosts} hosts: give one rate, or one per host")
        texts = texts * self.hosts if len(texts) == 1 else texts
        return tuple(parse_rate(self.slow_links.get(host, text)) for host, text in enumerate(texts))

    @property
    def latency_s(self) -> float:
        """Added one-way latency in seconds."""
        return parse_duration(self.latency)

    @property
    def planned(self) -> tuple[Fault, ...]:
        """The faults, read."""
        texts = [self.faults] if isinstance(self.faults, str) else self.faults
        return tuple(parse_fault(text) for text in texts)

    def to_json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        pairs = {"slow": list(self.slow.items()), "slow_links": list(self.slow_links.items())}
        return values | {"rate": [rate.text for rate in self.rates]} | pairs

    @staticmethod
    def from_json(values: dict[str, Any]) -> LabSpec:
        """The inverse of `to_json`."""
        return LabSpec(**values | {name: dict(values[name]) for name in ("slow", "slow_links")})

    def _check_slow(self, host: int, factor: float) -> None:
        self._check_host("slow", host)
        if not (is_number(factor) and 1 <= factor <= 100):
            raise ConfigurationError(f"host {host} is slowed by {factor!r}: the factor must be a number from 1 to 100")

    def _check_fault(self, fault: Fault) -> None:
        if fault.kind in OF_HOSTS:
            self._check_host(f"fault {fault.kind}", fault.target)
            if self.shaping in ("runner", "none"):
                raise ConfigurationError(
                    f"fault {fault.kind} breaks a host's link, which shaping={self.shaping!r} does not have"
                )
        elif fault.target not in range(self.world):
            raise ConfigurationError(f"fault {fault.kind} names rank {fault.target}: ranks are 0 to {self.world - 1}")
        if fault.kind in OF_RANKS and self.slow_by == "stopping" and fault.target // self.procs_per_host in self.slow:
            raise ConfigurationError(
                f"fault {fault.kind} of rank {fault.target}, whose host is slowed by stopping and continuing it: use "
                "slow_by='telling', or another rank"
            )

    def _check_host(self, name: str, host: int) -> None:
        if host not in range(self.hosts):
            raise ConfigurationError(f"{name} names host {host}: hosts are 0 to {self.hosts - 1}")


def _listed(rates: Any) -> list[str]:
    """Several rates as a list; anything else as the only one, to be refused as such."""
    return list(rates) if isinstance(rates, Sequence) else [rates]


def _one_of(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigurationError(f"{name} is {value!r}: it must be one of {', '.join(choices)}")


def _whole(name: str, value: int, low: int, high: int) -> None:
    if not is_whole(value, low, high):
        raise ConfigurationError(f"{name} is {value!r}: it must be a whole number from {low} to {high}")
