"""Discarded: what becomes of backward passes for which an optimizer takes no step, and of what was kept back in them.

A pass may be another optimizer's (a generator's goes through its discriminator), or its step is left out. Its gradients are
cleared then, and what error feedback has kept back of them must not be sent later either: the next pass begins with what
was remembered when the last step was taken. Where gradients are added to, all of it stays.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor

from gossamer.engine.exchange import Exchange
from gossamer.engine.slots import Slot
from gossamer.errors import UsageError


class Discarded:
    """Of each of several optimizers, whether what passes gave it was used. All ranks see that alike."""

    def __init__(self, exchange: Exchange, slots: Mapping[str, Slot], owners: Sequence[Set[str]]) -> None:
        """``owners``: the names of each optimizer's parameters."""
        self._exchange, self._slots, self._owners = exchange, slots, owners
        self._versions = self._count()

    def _count(self) -> list[int]:
        """Of each optimizer: a number that is another one when any of its parameters has changed."""
        return [sum(self._slots[name].parameter._version for name in names) for names in self._owners]

    def confirm(self, waiting: Collection[int]) -> None:
        """All but these optimizers have taken a step since the last pass, and so used what it gave. Of these, somebody else
        has (an optimizer around the one that was given) where weights have changed all the same."""
        self._exchange.land()
        before, self._versions = self._versions, self._count()
        for index, names in enumerate(self._owners):
            if index not in waiting or self._versions[index] != before[index]:
                self._exchange.states.confirm(names)

    def undo(self, waiting: Collection[int], first: Tensor | None, accumulated: bool) -> None:
        """A pass begins with the gradient of ``first``: forget what was not used, unless a gradient is there.

        One in a bucket is what a pass has left, or is added to it, or was set to zero there, which looks as if it was added to.
        One in other memory was made of it by the user, unless it is new: of ``first``, or ``accumulated`` inside no_sync().
        """
        for index in waiting:
            names = self._owners[index]
            if next(self._held(names), None) is None and (accumulated or not self._replaced(names, first)):
                self._exchange.states.undo(self._owners[index])

    def refuse_sums(self, waiting: Collection[int], step: int) -> None:
        """Raise if the pass that begins at ``step`` adds to gradients that have the momentum in them: those of these
        optimizers, if the last pass has reached them and they are not cleared."""
        for index in waiting:
            reached = any(self._slots[name].ready for name in self._owners[index])
            counts = [view.count_nonzero() for view in self._held(self._owners[index])] if reached else []
            if counts and torch.stack(counts).count_nonzero() > 1:  # one may be of this pass
                raise UsageError(
                    f"rank {self._exchange.runner.rank}: a second backward pass without an optimizer's step between (step "
                    f"{step}), with momentum_correction, which gives gradients that have the momentum in them; accumulate "
                    "inside no_sync(), and clear gradients that nobody uses before the next pass"
                )

    def _replaced(self, names: Set[str], first: Tensor | None) -> bool:
        """Whether these parameters have gradients in memory of the user's. An optimizer's only one may be that of ``first``,
        and then has been added to."""
        slots = [self._slots[name] for name in names]
        grads = {slot.name: slot.parameter.grad for slot in slots if slot.parameter.grad is not None}
        if len(slots) == 1 and slots[0].parameter is first:
            return any(grad._version > 0 for grad in grads.values())
        return any(slot.name in grads for slot in slots if slot.parameter is not first)

    def _held(self, names: Set[str]) -> Iterator[Tensor]:
        """What lies in buckets and is the gradient of one of these parameters."""
        for slot in map(self._slots.__getitem__, names):
            if slot.holds:
                yield slot.view
