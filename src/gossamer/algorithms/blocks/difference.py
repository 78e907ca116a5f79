"""Difference: what an exchange of weights brings, as the messages that it is made of."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.memory import portions


@dataclass(frozen=True, slots=True)
class Difference:
    """``share``·Σ(theirs − mine), computed where it is added to the weights: no tensor of their size is made of it.

    ``mine`` and each of ``theirs``: flat messages of one type, with the segments of the bucket. They are only read, and stay as
    they are until the next exchange of the bucket begins. Without ``mine`` it is the one tensor of ``theirs``.
    """

    mine: Tensor | None
    theirs: Sequence[Tensor]
    share: float = 1.0

    @classmethod
    def of(cls, result: "Tensor | Difference") -> "Difference":
        """What an exchange of weights returned: a tensor to add, or a difference."""
        return result if isinstance(result, Difference) else cls(None, [result])

    @property
    def shape(self) -> torch.Size:
        """That of the bucket."""
        return (self.theirs[0] if self.mine is None else self.mine).shape

    def into(self, out: Tensor) -> Tensor:
        """Write it into ``out``, a flat tensor in whose type it is computed. Returns that."""
        if not self.theirs:
            return out.zero_()
        if self.mine is None:
            return out.copy_(self.theirs[0])
        for number, message in enumerate(self.theirs):
            add_difference(message, self.mine, self.share, out, fresh=number == 0)
        return out


def computed(result: Tensor | Difference, dtype: torch.dtype) -> Tensor:
    """What an exchange of weights returned, as a flat tensor of type ``dtype``."""
    difference = Difference.of(result)
    if difference.mine is None:
        return difference.theirs[0].to(dtype)
    return difference.into(torch.empty_like(difference.mine, dtype=dtype))


def add_difference(theirs: Tensor, mine: Tensor, share: float, out: Tensor, fresh: bool) -> None:
    """Add share·(theirs − mine), computed in the type of ``out``; ``fresh``: to nothing, whatever is there."""
    for a, b, result in portions(theirs, mine, out):
        if fresh:
            torch.sub(a.to(out.dtype), b, out=result).mul_(share)
        else:
            result.add_(a.to(out.dtype) - b, alpha=share)
