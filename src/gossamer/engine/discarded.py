"""Discarded: what becomes of backward passes for which an optimizer takes no step, and of what was kept back in them.

A pass may be another optimizer's (a generator's goes through its discriminator), or its step is left out. Its gradients are
cleared then, and what error feedback has kept back of them must not be sent later either: when the next pass begins, it is
forgotten. Where gradients are added to, the next pass decides for all of them.
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

    def keep_used(self, waiting: Collection[int], versions: Sequence[int]) -> list[int]:
        """Keep what the last pass wrote of optimizers that have used it; returns the others, by number.

        All but the ``waiting`` ones have taken a step since. For one of these another optimizer has (one around it, say) where
        its weights have changed all the same. ``versions``: of all parameters, when that pass began.
        """
        self._exchange.states.complete()
        pairs = zip(self._slots.values(), versions, strict=True)
        changed = {slot.name for slot, version in pairs if slot.parameter._version != version}
        unused = [index for index in waiting if not changed & self._owners[index]]
        for index, names in enumerate(self._owners):
            if index not in unused:
                self._exchange.states.commit(self._buckets(names))
        return unused

    def keep_or_forget(
        self, waiting: Collection[int], versions: Sequence[int], first: Tensor | None, accumulated: bool
    ) -> None:
        """A pass begins with the gradient of ``first``: keep what was written for gradients that were used, and forget it
        of gradients that were thrown away. Where gradients are there to be added to, neither is known yet.

        One in a bucket is what a pass has left, or is added to it, or was set to zero there, which looks as if it was added to.
        One in other memory was made of it by the user, unless it is new: of ``first``, or ``accumulated`` inside no_sync().
        """
        for index in self.keep_used(waiting, versions):
            names = self._owners[index]
            if next(self._held(names), None) is None and (accumulated or not self._replaced(names, first)):
                self._exchange.states.rollback(self._buckets(names))

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

    def _buckets(self, names: Set[str]) -> list[int]:
        """The buckets of these parameters. No bucket of which anything is kept holds others, too."""
        return [bucket.index for bucket in self._exchange.buckets if any(s.name in names for s in bucket.segments)]

    def _held(self, names: Set[str]) -> Iterator[Tensor]:
        """What lies in buckets and is the gradient of one of these parameters."""
        for slot in map(self._slots.__getitem__, names):
            if slot.holds:
                yield slot.view
