"""Difference: what an exchange of weights brings, as the messages that it is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Difference:
    """``share``·Σ(theirs − mine), which is computed where it is added: of one partner's message in one pass over the weights.

    ``mine`` and each of ``theirs``: flat messages of one type, laid out as the bucket.
    """

    mine: Tensor
    theirs: Sequence[Tensor]
    share: float

    @property
    def shape(self) -> torch.Size:
        """That of the bucket."""
        return self.mine.shape

    def computed(self, dtype: torch.dtype) -> Tensor:
        """A new flat tensor of it."""
        if not self.theirs:
            return torch.zeros_like(self.mine, dtype=dtype)
        mine = self.mine.to(dtype)
        first, *others = (message.to(dtype) - mine for message in self.theirs)
        for other in others:
            first += other
        return first.mul_(self.share)
