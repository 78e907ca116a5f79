"""Checks: what many options must be."""

from typing import TypeGuard


def is_whole(value: object, least: float = float("-inf"), most: float = float("inf")) -> TypeGuard[int]:
    """Whether it is one of Python's integers, and no truth value, from ``least`` to ``most``."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_number(value: object) -> TypeGuard[float]:
    """Whether it is one of Python's integers or floats, and no truth value. NaN and infinities are numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def hint_at_class(value: object) -> str:
    """What to add where an instance was wanted and its class was given; nothing for anything else."""
    return f": write {value.__name__}()" if isinstance(value, type) else ""
