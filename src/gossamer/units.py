"""Units: quantities as text with a unit, as in ``10gbit``, ``50us``, ``8MB``."""

import re
from decimal import Decimal

from gossamer.errors import ConfigurationError

_NUMBER = r"(\d+(?:\.\d*)?(?:e[+-]?\d+)?|\.\d+)"
_PREFIX = {"": 0, "k": 3, "m": 6, "g": 9, "t": 12}
_SECONDS = {"us": Decimal("1e-6"), "ms": Decimal("1e-3"), "s": Decimal(1), "min": Decimal(60), "h": Decimal(3600)}
_BITS = {
    f"{prefix}{unit}": bits * Decimal(10) ** power
    for prefix, power in _PREFIX.items()
    for unit, bits in (("bit", 1), ("byte", 8))
}
_BYTES = {f"{prefix}b": Decimal(10) ** power for prefix, power in _PREFIX.items()}
_BYTES |= {f"{prefix}ib": Decimal(2) ** power for prefix, power in (("k", 10), ("m", 20), ("g", 30))}


def bits_per_second(text: object) -> float:
    """A rate such as ``10gbit`` or ``25mbyte`` (decimal prefixes, as in tc). Raises ConfigurationError."""
    return _quantity(text, _BITS, "rate", "10gbit (bits per second) or 25mbyte (bytes per second)", r"(?:/s)?")


def bytes_per_second(text: object) -> float:
    """A speed of copying or encoding, such as ``3.2GB/s``. Raises ConfigurationError."""
    return _quantity(text, _BYTES, "speed", "3.2GB/s", "/s")


def nbytes(text: object) -> float:
    """An amount of memory such as ``8MB`` or ``4MiB``. Raises ConfigurationError."""
    return _quantity(text, _BYTES, "amount of memory", "8MB")


def seconds(text: object) -> float:
    """A duration such as ``50us``, ``2ms``, ``0.3s``, or ``0``. Raises ConfigurationError."""
    if text in (0, "0"):
        return 0.0
    return _quantity(text, _SECONDS, "duration", "50us, 2ms or 0.3s")


def _quantity(text: object, units: dict[str, Decimal], what: str, example: str, end: str = "") -> float:
    word = text.strip().lower() if isinstance(text, str) else ""
    match = re.fullmatch(rf"{_NUMBER}\s*([a-z]+){end}", word)
    if match is None or match[2] not in units:
        bare = isinstance(text, int | float) or re.fullmatch(_NUMBER, word)
        problem = "has no unit" if bare else f"is no {what}"
        raise ConfigurationError(f"{text!r} {problem}: write for example {example}")
    return float(Decimal(match[1]) * units[match[2]])  # in decimals, so that 50us is 5e-5
