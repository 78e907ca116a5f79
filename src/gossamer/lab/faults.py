"""Faults: what the lab breaks during a run, when, and on which rank or host."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from gossamer.errors import ConfigurationError
from gossamer.lab.rates import Rate, parse_duration, parse_rate

OF_RANKS = ("kill", "stop", "restart")
"""Faults of one process. ``stop`` takes a duration; without one the process is never continued."""

OF_HOSTS = ("cut", "power-off", "throttle")
"""Faults of one host's link, which only network namespaces can cause."""

_FORM = (
    "write 'kill RANK @TIME', 'stop RANK [SECONDS] @TIME', 'restart RANK @TIME', 'cut HOST [SECONDS] @TIME', "
    "'power-off HOST @TIME' or 'throttle HOST RATE [SECONDS] @TIME', for example 'kill 2 @20s'"
)

_LINE = "line:"


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault: ``kind`` on rank or host ``target``.

    ``at``: seconds after the ranks were started; or ``line``: as soon as a rank has written a line that contains this text.
    ``seconds``: after which the fault ends; None if it does not. ``rate``: of a throttled link.
    """

    kind: str
    target: int
    at: float | None = None
    line: str | None = None
    seconds: float | None = None
    rate: Rate | None = None

    def __str__(self) -> str:
        what = "rank" if self.kind in OF_RANKS else "host"
        rate = f" to {self.rate.text}" if self.rate else ""
        return f"{self.kind} {what} {self.target}{rate}" + ("" if self.seconds is None else f" for {self.seconds:g} s")


def parse_fault(text: str) -> Fault:
    """Read a fault such as ``kill 2 @20s``, ``stop 1 5s @20s``, ``throttle 3 4mbit @line:epoch``.

    Raises ConfigurationError that names the wrong word, for anything else.
    """
    what, found, when = text.partition("@") if isinstance(text, str) else ("", "", "")
    words = what.split()
    if not words or words[0] not in (*OF_RANKS, *OF_HOSTS):
        raise ConfigurationError(f"{words[0] if words else text!r} is no fault: {_FORM}")
    if not found:
        raise ConfigurationError(f"fault {text!r} does not say when: add @TIME, for example {what.strip()!r} @20s")
    kind, rest = words[0], words[1:]
    target, rest = _target(text, kind, rest), rest[1:]
    rate = _rate(text, rest) if kind == "throttle" else None
    rest = rest[1:] if rate is not None else rest
    seconds = _seconds(text, rest.pop(0)) if rest and kind in ("stop", "cut", "throttle") else None
    if rest:
        raise ConfigurationError(f"fault {text!r}: {rest[0]!r} is one word too many: {_FORM}")
    at, line = _moment(text, when.strip())
    return Fault(kind=kind, target=target, at=at, line=line, seconds=seconds, rate=rate)


def _target(text: str, kind: str, rest: Sequence[str]) -> int:
    what = "rank" if kind in OF_RANKS else "host"
    if not rest:
        raise ConfigurationError(f"fault {text!r} does not say which {what}: {_FORM}")
    if not re.fullmatch(r"\d+", rest[0]):
        raise ConfigurationError(f"fault {text!r}: {rest[0]!r} is no {what}: give its number, such as 2")
    return int(rest[0])


def _rate(text: str, rest: Sequence[str]) -> Rate:
    if not rest:
        raise ConfigurationError(f"fault {text!r} does not say to which rate: {_FORM}")
    try:
        rate = parse_rate(rest[0])
    except ConfigurationError as error:
        raise ConfigurationError(f"fault {text!r}: {error}") from None
    if rate.bps is None:
        raise ConfigurationError(f"fault {text!r}: {rest[0]!r} does not throttle: give a rate, such as 4mbit")
    return rate


def _seconds(text: str, word: str) -> float:
    try:
        return parse_duration(word)
    except ConfigurationError as error:
        raise ConfigurationError(f"fault {text!r}: {error}") from None


def _moment(text: str, when: str) -> tuple[float | None, str | None]:
    if when.startswith(_LINE) and when != _LINE:
        return None, when.removeprefix(_LINE)
    try:
        return parse_duration(when), None
    except ConfigurationError:
        raise ConfigurationError(f"fault {text!r}: {when!r} is no time: write for example @20s, or @line:TEXT") from None
