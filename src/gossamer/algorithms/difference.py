"""Difference: what an exchange of weights brings, as the messages that it is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.messages import add_difference

IN_ONE_PASS = {(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)}
"""Of which types weights and messages are that a difference is added to in one pass over the host's memory."""


@dataclass(frozen=True, slots=True)
class Difference:
    """``share``·Σ(theirs − mine), which is computed where it is added: of one partner's message in one pass over the weights.

    ``mine`` and each of ``theirs``: flat messages of one type, laid out as the bucket. They are only read, and stay as they
    are until the next exchange of the bucket begins.
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
        total = torch.zeros_like(self.mine, dtype=dtype)
        for number, message in enumerate(self.theirs):
            add_difference(message, self.mine, self.share, total, fresh=number == 0)
        return total
