"""The random number generators of many ranks in one process: each rank finds them as it left them."""

import ctypes
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MT19937_BYTES = 624 * 4 + 4  # of the generator in C: its key, and the position in it


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
        untouched = before is not None and before.is_whole_in_bits() and bits == before.numpy_bits
        numpy = before.numpy if before is not None and untouched else np.random.get_state()
        return cls(random.getstate(), numpy, bits, torch.get_rng_state())

    def put(self, instead_of: "Generators | None" = None) -> None:
        """Put it into place; ``instead_of`` is the state that is there, if it is known."""
        random.setstate(self.python)
        torch.set_rng_state(self.torch)
        there = instead_of is not None and instead_of.is_whole_in_bits() and self.numpy_bits == instead_of.numpy_bits
        if not (there and self.is_whole_in_bits()):
            np.random.set_state(self.numpy)

    def is_whole_in_bits(self) -> bool:
        """Whether NumPy's bits are all of its state: it holds no normal number that was drawn and not given out yet."""
        return self.numpy_bits is not None and not self.numpy[3]


class Turns:
    """The generators of every rank, all alike at first, of which one rank's are in place."""

    def __init__(self, ranks: int) -> None:
        self._placed = Generators.now()
        self._of = [self._placed] * ranks

    def leave(self, rank: int) -> None:
        """Remember how this rank, whose turn it was, leaves them."""
        self._of[rank] = self._placed = Generators.now(self._placed)

    def enter(self, rank: int) -> None:
        """Put those of this rank, whose turn it is, into place."""
        self._of[rank].put(self._placed)
        self._placed = self._of[rank]


def _numpy_bits() -> bytes | None:
    """NumPy's generator, copied as it lies in memory: 1 µs, where asking for its state takes 40 and setting it 45."""
    generator = np.random.get_bit_generator()  # type: ignore[attr-defined] # NumPy's stubs forget it
    return ctypes.string_at(generator.ctypes.state_address, _MT19937_BYTES) if type(generator) is np.random.MT19937 else None
