"""Communicating optimizer: one that talks to the other workers inside its own step."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.memory import wide

Write = Callable[[int, Tensor], None]
"""``write(index, place)``: put what is to be averaged for the parameter of this index into ``place``, a tensor of its shape."""


class Link(Protocol):
    """The way to the other workers. Every worker makes the same calls, with tensors in the order of the parameters."""

    def used(self, here: Sequence[bool]) -> Callable[[], list[bool]]:
        """Ask which parameters have a gradient on any worker; the answer is waited for when it is called."""

    def mean(self, write: Write, compressed: bool, step: int) -> list[Tensor]:
        """The means over the workers of what ``write`` writes; ``compressed`` ones by the optimizer's own algorithm.

        Compressed means are the caller's until the one after the next call of this kind; exact ones until the next.
        """


class Communicating(Optimizer):
    """Base of optimizers that communicate by themselves, after clipping and unscaling.

    :func:`gossamer.replicate` gives such an optimizer its :class:`Link` and leaves the gradients alone. Without one it
    is the optimizer of a single worker.
    """

    link: Link | None = None

    @property
    @abstractmethod
    def algorithm(self) -> Algorithm:
        """How compressed means travel; exact ones are all-reduced."""

    def parameters(self) -> list[Tensor]:
        """The trainable parameters, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"] if parameter.requires_grad]

    def means(self, write: Write, compressed: bool, step: int) -> list[Tensor]:
        """The means over the workers of one tensor per parameter, at the optimizer's own count of steps.

        ``compressed`` ones are in at least fp32, exact ones in the parameter's dtype.
        """
        if self.link is not None:
            return self.link.mean(write, compressed, step)
        places = [torch.empty_like(wide(p) if compressed else p) for p in self.parameters()]
        for index, place in enumerate(places):
            write(index, place)
        return places
