"""Residual: what was not sent, in the type in which it is kept."""

from torch import Tensor

from gossamer.codecs.cast import Wire, narrow_into, wire_codec
from gossamer.state import RESIDUAL, State


def stays_as_it_is(rest: Tensor, residual: Wire) -> bool:
    """Whether a remainder has the type already in which it is kept."""
    return wire_codec(residual).wire_dtype(rest.dtype) == rest.dtype


def keep_back(state: State, rest: Tensor, residual: Wire, key: str = RESIDUAL) -> None:
    """Remember ``rest`` as what is owed, in the type in which that is kept: itself, if it is that already.

    What is too large for that type is kept as the largest that it has: one worker alone must not come to inf, for which all
    would have to forget this step.
    """
    if stays_as_it_is(rest, residual):
        state[key] = rest
        return
    dtype = wire_codec(residual).wire_dtype(rest.dtype)
    state[key] = narrow = state.fresh(key, rest, dtype)
    narrow_into(narrow, rest)
