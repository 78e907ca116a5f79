"""Slots: where each parameter's gradient goes, and a step whose buckets are still under way."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.runner import Ticket
from gossamer.engine.sharding import as_placed, is_sharded, local, set_local, wrapped
from gossamer.errors import ConfigurationError, UsageError
from gossamer.memory import as_real

NOT_YET = (
    "Gradients are not averaged before the end of backward(): take the step after it, or exchange weights (gossamer.Gossip()), "
    "which leaves gradients alone"
)


class Slot:
    """One parameter's place: its bucket, its view in the bucket's flat tensor, and whether its gradient has come.

    ``share``: what the gradient is multiplied by on its way into the bucket, if it is. A gradient lies in the bucket if its
    memory does, whatever tensor it is: ``p.grad.data = …`` and ``model.to(…)`` move a gradient and keep the object. A complex
    one is copied in and out, because its place among real numbers may begin between two halves. Of a sharded one it is what
    this rank holds: the DTensor around it stays, and is given the place in the bucket to hold.
    """

    __slots__ = ("bucket", "copy", "name", "parameter", "rank", "ready", "sharded", "share", "view")

    def __init__(self, name: str, parameter: Parameter, rank: int = 0) -> None:
        self.rank: int = rank
        self.name: str = name
        self.parameter: Parameter = parameter
        self.bucket: int = 0
        self.view: Tensor = local(parameter.detach())
        self.ready: bool = False
        self.sharded: bool = is_sharded(parameter)
        self.share: Tensor | None = None
        self.copy: Tensor | None = None
        """The complex gradient that the last exchange has given."""

    @property
    def _what(self) -> str:
        return f"rank {self.rank}: parameter {self.name!r}"

    @property
    def holds(self) -> bool:
        """Whether the gradient is what the last exchange gave, or was added to it in its place."""
        grad, place = self.parameter.grad, self.view if self.copy is None else self.copy
        return grad is not None and (local(grad) if self.sharded else grad).data_ptr() == place.data_ptr()

    def collect(self) -> None:
        """Copy the gradient into the bucket, unless it lies there, and make its place there the gradient."""
        grad, view, share = self.parameter.grad, self.view, self.share
        if grad is None:
            raise UsageError(
                f"rank {self.rank}: the gradient of parameter {self.name!r} was taken away by a hook, of an optimizer "
                f"that steps inside backward? {NOT_YET}"
            )
        if grad.layout is not torch.strided:
            raise ConfigurationError(f"{self._what} has a sparse gradient; use sparse=False in its module")
        if self.sharded:
            grad = self._part(grad)
        in_place = grad.data_ptr() == view.data_ptr()
        if in_place and grad.stride() == view.stride():
            if share is not None:
                view.mul_(share)
            return
        if grad.requires_grad:
            raise self._of_graph()
        if in_place:  # in another order
            grad = grad.clone()
        own = as_real(grad) if grad.is_complex() else grad
        if own.dtype != view.dtype:
            raise ConfigurationError(
                f"{self._what} has a gradient of {grad.dtype}, and its place in the bucket is {view.dtype}: set its "
                "grad_dtype to that before replicate(), or, if the model was converted, close the replica and call it again"
            )
        if share is not None:
            torch.mul(own, share, out=view)
        else:
            view.copy_(own)
        if own is grad:
            self.parameter.grad = self._around(view.detach())

    def _part(self, gradient: Tensor) -> Tensor:
        """What this rank holds of a sharded parameter's gradient."""
        if gradient.requires_grad:
            raise self._of_graph()
        placed = as_placed(gradient, self.parameter)
        if placed is not gradient:
            self.parameter.grad = placed
        return local(placed)

    def _of_graph(self) -> UsageError:
        return UsageError(
            f"rank {self.rank}: backward(create_graph=True) gave parameter {self.name!r} a gradient that is part of a "
            "graph, and a mean over the ranks is not: a loss made of p.grad would lose it. Take torch.autograd.grad(loss, "
            "parameters, create_graph=True), or this pass inside replica.no_sync()"
        )

    def gradient(self) -> Tensor:
        """What lies in the bucket, as a gradient: another tensor over the same memory. The view itself stays where it is,
        whatever is done to that."""
        if self.parameter.is_complex():
            self.copy = torch.view_as_complex(self.view.clone())
            return self._around(self.copy)
        return self._around(self.view.detach())

    def _around(self, own: Tensor) -> Tensor:
        """As the parameter's gradient is: of a sharded one the DTensor that is there, or a new one."""
        if not self.sharded:
            return own
        if self.parameter.grad is None:
            return wrapped(own, self.parameter)
        set_local(self.parameter.grad, own)
        return self.parameter.grad


def like_gradient(parameter: Parameter) -> Tensor:
    """A tensor with the shape, strides, type and device that the parameter's gradient has in a bucket."""
    dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype  # since torch 2.10
    own = local(parameter.detach())
    return as_real(own if dtype == own.dtype else torch.empty_like(own, dtype=dtype))


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


def require_unchanged(rank: int, slots: Iterable[Slot], versions: Sequence[int]) -> None:
    """Raise if a parameter was updated while its gradient was on its way: by the gradient of this rank alone. ``versions``: of
    the parameters, when the pass began."""
    for slot, version in zip(slots, versions, strict=True):
        if slot.parameter._version != version or (slot.ready and slot.parameter.grad is None):
            raise UsageError(
                f"rank {rank}: parameter {slot.name!r} was changed, or its gradient taken away, during the backward pass, by "
                f"an optimizer that steps in gradient hooks? {NOT_YET}"
            )
