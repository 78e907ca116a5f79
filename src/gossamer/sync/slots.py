"""Slots: where each parameter's gradient goes, and a step whose buckets are still under way."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.runner import Ticket
from gossamer.errors import ConfigurationError, UsageError


class Slot:
    """One parameter's place: its bucket, its view in the bucket's flat tensor, and whether its gradient has come.

    ``share``: what the gradient is multiplied by on its way into the bucket, if it is.
    """

    __slots__ = ("bucket", "name", "parameter", "ready", "share", "view")

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.bucket, self.view, self.ready = 0, parameter.detach(), False
        self.share: Tensor | None = None

    def collect(self) -> None:
        """Lay the gradient into the bucket, and make the bucket's view the gradient."""
        grad, view, share = self.parameter.grad, self.view, self.share
        if grad is None:
            raise UsageError(f"parameter {self.name!r} lost its gradient during backward")
        if grad.layout is not torch.strided:
            raise ConfigurationError(f"parameter {self.name!r} has a sparse gradient; use sparse=False in its module")
        if grad.data_ptr() == view.data_ptr():
            if share is not None:
                view.mul_(share)
            return
        if grad.requires_grad:  # create_graph=True
            grad = grad.detach()
        if share is not None:
            torch.mul(grad, share, out=view)
        else:
            view.copy_(grad)
        self.parameter.grad = view


@dataclass(slots=True)
class OpenStep:
    """A step whose backward pass is over and whose buckets are still under way."""

    buckets: set[int]
    """Which of them are not placed."""
    unused: set[str]
    """What has no gradient here."""
    asked: Ticket[Tensor] | None
    """The question who else has none, if it is not answered in a bucket."""
    nowhere: set[str] | None = None
    """The answer: what has no gradient on any rank."""
