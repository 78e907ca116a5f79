"""The random number generators of many ranks in one process: each rank finds them as it left them."""

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_KEY_BYTES = 624 * 4 + 4  # of MT19937 in C: its key, and the position in it
_HEAD_BYTES = object.__basicsize__  # what every object begins with: how often it is referred to, and its type


@dataclass(frozen=True)
class Generators:
    """The state of Python's, NumPy's and PyTorch's (CPU) global generators."""

    python: tuple[Any, ...]
    numpy: Any
    numpy_bits: bytes | None
    torch: Tensor

    @classmethod
    def now(cls, before: "Generators | None" = None) -> "Generators":
        """What it is now; ``before`` is the state that was put into place last, and was drawn from since, if at all."""
        bits = _numpy_bits()
        untouched = before is not None and bits is not None and bits == before.numpy_bits
        numpy = before.numpy if before is not None and untouched else np.random.get_state()
        return cls(random.getstate(), numpy, bits, torch.get_rng_state())

    def put(self, instead_of: "Generators | None" = None) -> None:
        """Put it into place; ``instead_of`` is the state that is there, if it is known."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        there = instead_of is not None and self.numpy_bits is not None and self.numpy_bits == instead_of.numpy_bits
        if not there:
            np.random.set_state(self.numpy)


class Turns:
    """The generators of every rank, all alike at first, of which one rank's are in place."""

    def __init__(self, ranks: int) -> None:
        self._placed: Generators | None = Generators.now()
        self._of = [self._placed] * ranks

    def leave(self, rank: int) -> None:
        """Remember how this rank, whose turn it was, leaves them."""
        self._of[rank] = self._placed = Generators.now(self._placed)

    def end(self) -> None:
        """The rank whose turn it was has no other one: what it leaves is looked at by nobody."""
        self._placed = None

    def enter(self, rank: int) -> None:
        """Put those of this rank, whose turn it is, into place."""
        self._of[rank].put(self._placed)
        self._placed = self._of[rank]


def _numpy_bits() -> bytes | None:
    """NumPy's global state, copied as it lies in memory: 2 µs, where asking for it takes 40 and setting it 45.

    The generator's key and position, and all that the object around it holds: the normal number that was drawn together
    with another one and not given out yet is a part of the state. None for a generator of another kind.
    """
    around, generator = np.random.mtrand._rand, np.random.get_bit_generator()  # type: ignore[attr-defined]
    if type(generator) is not np.random.MT19937:
        return None
    held = ctypes.string_at(id(around) + _HEAD_BYTES, type(around).__basicsize__ - _HEAD_BYTES)
    return ctypes.string_at(generator.ctypes.state_address, _KEY_BYTES) + held
