"""Carrying: what an exchange has brought is added, and what the next one sends is written, in the optimizer's own pass."""

from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gossamer.optim.wide import Wide

Array = npt.NDArray[Any]


class Legs(NamedTuple):
    """What is done to stretches of float32 weights while an optimizer is at them: the stretch of the weights as a whole, and of
    two messages and of one that is written, flat and of bfloat16 numbers.

    ``first``, ``last``: ``int64[weights]``, of which rows the stretches of each weight are, in order and apart from each other.
    ``rows``: ``int64[stretches, 5]``, the element of the weight where each begins; its elements; the address of the partner's
    message and of one's own (0: nothing was brought); and that of the message to be written (0: none). ``numbers``:
    ``float32[stretches, 2]``, the share of the difference that is added before the update, and by how many updates like this
    one the message is ahead.
    """

    first: Array
    last: Array
    rows: Array
    numbers: Array

    @staticmethod
    def none(weights: int) -> "Legs":
        """Nothing to be done to any of so many weights."""
        nowhere = np.zeros(weights, np.int64)
        return Legs(nowhere, nowhere, np.zeros((0, 5), np.int64), np.zeros((0, 2), np.float32))


class Cargo(Protocol):
    """What is to be added to weights before an update, and to be sent of them after it."""

    def take(self, addresses: Array) -> Legs:
        """What the caller does, at once, to the weights at these addresses (``int64[weights]``, of whole tensors): nobody else
        will."""

    def unload(self) -> None:
        """Add everything else now, because weights are about to be updated in another way, and have it sent as it ever was."""


class Carrier(Wide):
    """An optimizer that takes care of its ``cargo`` in its own pass over the weights, which then are in a cache already.

    Whoever gives it one, before a step, takes back what is left after it.
    """

    cargo: Cargo | None = None
