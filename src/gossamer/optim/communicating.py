"""Communicating optimizer: one that talks to the other workers inside its own step."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm


class Link(Protocol):
    """The way to the other workers. Every worker makes the same calls, with tensors in the order of the parameters."""

    def used(self, here: Sequence[bool]) -> Callable[[], list[bool]]:
        """Ask which parameters have a gradient on any worker; the answer is waited for when it is called."""

    def mean(self, tensors: Sequence[Tensor], compressed: bool, step: int) -> list[Tensor]:
        """The means over the workers; ``compressed`` ones by the optimizer's own algorithm. New tensors."""


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

    def means(self, tensors: Sequence[Tensor], compressed: bool, step: int) -> list[Tensor]:
        """The means over the workers of one tensor per parameter, at the optimizer's own count of steps."""
        return [t.clone() for t in tensors] if self.link is None else self.link.mean(tensors, compressed, step)
