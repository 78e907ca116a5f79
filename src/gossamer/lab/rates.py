"""Rate: how many bits per second a host may send, and as many receive."""

from __future__ import annotations

import re
from dataclasses import dataclass

from gossamer.errors import ConfigurationError

_NUMBER = r"(\d+(?:\.\d*)?|\.\d+)"
_RATE = re.compile(rf"{_NUMBER}\s*([kmg]?)(bit|byte)", re.IGNORECASE)
_DURATION = re.compile(rf"{_NUMBER}\s*(us|ms|s)", re.IGNORECASE)
_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_UNSHAPED = ("unshaped", "none")

# A token bucket's rate is handed to the kernel in 32 bits of bytes per second.
_FASTEST_BPS = 8.0 * (2**32 - 1)
_SLOWEST_BPS = 8e3


@dataclass(frozen=True, kw_only=True)
class Rate:
    """A host's rate: `bps` in bits per second (None: unshaped), and `text` as the user wrote it."""

    text: str
    bps: float | None

    @property
    def burst(self) -> int:
        """Bytes that may pass in one burst after silence: 16 kB, or 2 ms of the rate if that is more."""
        return 0 if self.bps is None else max(16_000, round(self.bps / 8 * 0.002))


def parse_rate(text: str) -> Rate:
    """Read a rate such as `200mbit`, `1gbit`, `25mbyte` (prefixes are decimal, as in tc) or `unshaped`.

    Raises ConfigurationError, with what was expected, for anything else.
    """
    word = _word(text)
    if word in _UNSHAPED:
        return Rate(text="unshaped", bps=None)
    match = _RATE.fullmatch(word)
    if match is None:
        raise ConfigurationError(f"{text!r} is no rate: {_advice(word)}")
    number, prefix, unit = match.groups()
    bps = float(number) * _PREFIX[prefix] * (8 if unit == "byte" else 1)
    if not _SLOWEST_BPS <= bps <= _FASTEST_BPS:
        raise ConfigurationError(f"{text!r} is no rate the lab can shape: from 8kbit to 34gbit, or unshaped")
    return Rate(text=word.replace(" ", ""), bps=bps)


def parse_duration(text: str) -> float:
    """Read a duration such as `2ms`, `500us`, `0.1s` or `0`, in seconds; ConfigurationError for anything else."""
    word = _word(text)
    if word == "0":
        return 0.0
    match = _DURATION.fullmatch(word)
    if match is None:
        raise ConfigurationError(f"{text!r} is no duration: write for example 2ms, 500us or 0.1s")
    return float(match[1]) * _SECONDS[match[2]]


def _word(text: object) -> str:
    """A text as it is compared; nothing for what is none."""
    return text.strip().lower() if isinstance(text, str) else ""


def _advice(word: str) -> str:
    if re.fullmatch(_NUMBER, word):
        return f"it has no unit; write {word}mbit for megabits per second"
    if re.fullmatch(rf"{_NUMBER}\s*[kmg]?b?ps", word):
        return "bits or bytes? write for example 200mbit (bits per second) or 25mbyte (bytes per second)"
    return "write for example 200mbit, 1gbit, 500kbit, 25mbyte or unshaped"
