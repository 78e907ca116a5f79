"""Options: what all ranks say alike of a shuffle, and a place in it."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from gossamer.checks import is_whole
from gossamer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of :class:`gossamer.data.RingShuffle` that are equal on all ranks. Raises ConfigurationError."""

    batch_size: int
    seed: int
    shuffle: bool
    mix: bool
    split: bool
    deal: bool
    drop_last: bool

    def __post_init__(self) -> None:
        if not is_whole(self.batch_size, 1):
            raise ConfigurationError(f"batch_size must be a positive integer; got {self.batch_size!r}")
        if not is_whole(self.seed):
            raise ConfigurationError(f"seed must be an integer; got {self.seed!r}")
        for name in ("shuffle", "mix", "split", "deal", "drop_last"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be True or False; got {getattr(self, name)!r}")

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def place_in(state: Any, made_for: str, steps: int) -> tuple[int, int]:
    """Local epoch and batch that a state tells, in a shuffle described by ``made_for`` of ``steps`` batches.

    Raises:
        ConfigurationError: it is no state of a shuffle, it is of another one, or there is no such place.
    """
    if not isinstance(state, Mapping) or state.get("format") != 1:
        raise ConfigurationError("this is no state of a RingShuffle; give what its state_dict() returned")
    missing = [key for key in ("epoch", "step", "made for") if key not in state]
    if missing:
        raise ConfigurationError(f"the state of the RingShuffle lacks {', '.join(map(repr, missing))}")
    if state["made for"] != made_for:
        raise ConfigurationError(f"the state is of {state['made for']}; this is {made_for}")
    epoch, step = state["epoch"], state["step"]
    if not is_whole(epoch, 0):
        raise ConfigurationError(f"the state's epoch must be a number of local epochs; got {epoch!r}")
    if not is_whole(step, 0, steps):
        raise ConfigurationError(
            f"the state's step must be a number of batches, at most the {steps} of a local epoch; got {step!r}"
        )
    return epoch, step
