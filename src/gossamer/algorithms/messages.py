"""Messages: what an exchange with partners makes of the weights of a bucket, and where their messages go."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gossamer.buckets import Bucket
from gossamer.codecs.wire import narrow_into
from gossamer.comm.ops import Flow, wait
from gossamer.memory import is_momentary, momentary, portions

PIECE_BYTES = 2**20
"""A longer message travels in pieces: one is rounded or averaged while others are on the wire."""


@dataclass(slots=True)
class Piece:
    """A piece of the weights, the message that is made of it, and where the partners' go; in the end, the difference to add.

    ``within``: the message lies in the weights' own memory. What is sent is only read: it stays what the partner receives.
    """

    weights: Tensor
    sent: Tensor
    places: Sequence[Tensor]
    within: bool
    handles: list[Any] = field(default_factory=list)

    def encode(self) -> None:
        """Round the weights to their message."""
        if not self.within:
            self._round_into(self.sent)
        elif self.sent.dtype != self.weights.dtype:
            self._round_into(rounded := self._aside())
            self.sent.copy_(rounded)

    def average(self) -> Flow[None]:
        """Make of the weights what is to be added to them."""
        first, *others = self.handles
        share = 1 / (len(self.handles) + 1)
        theirs = yield wait(first)
        if others:
            result = torch.empty_like(self.weights)
            add_difference(theirs, self.sent, share, result, fresh=True)
            for handle in others:
                add_difference((yield wait(handle)), self.sent, share, result, fresh=False)
            self.weights.copy_(result)
            return
        # The answer lies at the end of the piece: from the front on, nothing is overwritten that is still to be read.
        in_the_way = self.within and self.sent.dtype != self.weights.dtype
        add_difference(theirs, self._aside().copy_(self.sent) if in_the_way else self.sent, share, self.weights, fresh=True)

    def _round_into(self, message: Tensor) -> None:
        """In fp16, whose range a running variance may leave, without inf: the difference of two such would be NaN."""
        if message.dtype == torch.float16 != self.weights.dtype:
            narrow_into(message, self.weights)
        else:
            message.copy_(self.weights)

    def _aside(self) -> Tensor:
        return momentary(self.sent.numel(), self.sent.dtype, self.sent.device)


def pieces_of(bucket: Bucket, dtype: torch.dtype, partners: int) -> list[Piece]:
    """Places for messages of type ``dtype`` and for the answers of so many partners.

    A message of half the width and its answer fit into the memory of the weights they are made of. A short message does not go
    there: then nothing has to be moved out of the way of what is written over it.
    """
    flat, size = bucket.flat, max(1, PIECE_BYTES // dtype.itemsize)
    room = flat.element_size() // dtype.itemsize
    within = room == 1 or not is_momentary(flat.numel(), dtype, flat.device)
    views = bucket.views_of_flat(
        (dtype, size), lambda flat: [(piece, piece.view(dtype).tensor_split(room)) for piece in flat.split(size)]
    )
    sends = [own[0] for _, own in views] if within else _cut(momentary(flat.numel(), dtype, flat.device), size)
    beside = [_cut(bucket.scratch(f"received {i}", dtype), size) for i in range(partners + within - room)]
    return [
        Piece(weights, sent, [*reversed(own[within:]), *more][:partners], within)
        for (weights, own), sent, *more in zip(views, sends, *beside, strict=True)
    ]


def _cut(flat: Tensor, size: int) -> Sequence[Tensor]:
    split: Sequence[Tensor] = (flat,) if flat.numel() <= size else flat.split(size)
    return split


def add_difference(theirs: Tensor, mine: Tensor, share: float, out: Tensor, fresh: bool) -> None:
    """Add share·(theirs − mine), computed in the type of ``out``; ``fresh``: to nothing, whatever is there."""
    for a, b, result in portions(theirs, mine, out):
        if fresh:
            torch.sub(a.to(out.dtype), b, out=result).mul_(share)
        else:
            result.add_(a.to(out.dtype) - b, alpha=share)
