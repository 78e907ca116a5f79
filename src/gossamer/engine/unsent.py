"""Unsent: what an algorithm has not sent when another one takes its place, and how it travels with that."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.buckets import Bucket, Segment
from gossamer.codecs.residual import add_to
from gossamer.engine.loop import Subscriber
from gossamer.engine.sharding import local
from gossamer.errors import UsageError
from gossamer.memory import as_real, wide
from gossamer.state import RESIDUAL, State

INHERITED = f"inherited {RESIDUAL}"
"""The name under which a bucket keeps what the algorithm before its own has not sent. It ends as that of every residual does,
so it follows the loss scale, counts in ``residual_norm`` and is shared out among another number of ranks."""


def inherit(bucket: Bucket, state: State, world: int) -> None:
    """Add what was inherited to the gradients in ``bucket``, which are about to be exchanged."""
    unsent = state.get(INHERITED)
    if unsent is not None:
        bucket.flat.add_(unsent, alpha=1 / world if bucket.holds_shares else 1)
        state.scoped(INHERITED).forget()


def inherit_again(mean: Tensor, place: Segment, state: State, seed: int) -> None:
    """Nobody uses ``mean``, that part of the result of an exchange in which something was inherited: keep it as unsent."""
    if INHERITED not in state.flats.draft:
        return
    if state.written(INHERITED) is None:
        state[INHERITED] = torch.zeros_like(wide(state[INHERITED]))
    add_to(place.view(state[INHERITED]), mean, seed)


class Unsent(Subscriber):
    """Where only weights are exchanged: adds what was not sent to each worker's own gradient, in the units of which it is by
    then, so that it travels in the weights. A parameter without a gradient waits for one."""

    def __init__(self, tensors: Mapping[str, Tensor], parameters: Mapping[str, Parameter] | None = None) -> None:
        """``tensors``: by name, like the parameters of these names."""
        self.tensors: dict[str, Tensor] = dict(tensors)
        self._parameters, self._in_step = dict(parameters or {}), False

    def refuse(self, what: str) -> None:
        """Raise UsageError while anything waits here, which ``what`` would lose."""
        if self.tensors:
            raise UsageError(f"{what} between switch() and the next step, which takes what is unsent: call it after that")

    def before_step(self, index: int, closure: bool) -> None:
        self._in_step = closure
        if not closure:
            self._add()

    def end_backward(self) -> None:
        if self._in_step:
            self._add()

    @torch.no_grad()
    def _add(self) -> None:
        for name, gradient in list(self._reached()):
            gradient.add_(self.tensors.pop(name))

    def _reached(self) -> Iterator[tuple[str, Tensor]]:
        for name in self.tensors:
            gradient = self._parameters[name].grad
            if gradient is not None:
                yield name, as_real(local(gradient))
