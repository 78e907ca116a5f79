"""Ahead: messages of weights in which the next update is foreseen, so that averages are as old as the weights they change."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.bucket_plan import is_buffer
from gossamer.buckets import Bucket
from gossamer.engine.apply import pack
from gossamer.engine.history import weight_of
from gossamer.pieces import part_of


class Ahead:
    """Remembers weights from just before an update until they are sent, and sends them as far ahead as is wanted.

    The memory is the bucket's own: as much as its weights, and the same in every step.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[Tensor | None]] = {}
        """By bucket, where its members are remembered; None where it is sent as it is."""
        self._remembered: set[int] = set()

    def forget(self) -> None:
        """Buckets are others now."""
        self._places, self._remembered = {}, set()

    def remember(self, bucket: Bucket, members: Sequence[Tensor]) -> None:
        """An update is about to be made of ``members``, the tensors that the bucket is made of."""
        if bucket.index not in self._places:
            flat = self._memory(bucket)
            self._places[bucket.index] = [
                segment.view(flat) if is_weight(segment.name) else None for segment in bucket.segments
            ]
        places, weights = self._weights(bucket, members)
        if places:  # all of a bucket may be what an optimizer remembers
            torch._foreach_copy_(places, weights)
            self._remembered.add(bucket.index)

    def pack(self, bucket: Bucket, members: Sequence[Tensor], by: float) -> None:
        """Pack ``members`` into their bucket: w + by·(w − w before the update), if there was one."""
        if bucket.index in self._remembered:
            _move_beyond(*self._weights(bucket, members), by)
            places = self._places[bucket.index]
            self._remembered.discard(bucket.index)
            members = [member if place is None else place for place, member in zip(places, members, strict=True)]
        pack(bucket, members)

    @staticmethod
    def _memory(bucket: Bucket) -> Tensor:
        return bucket.scratch("before the update", bucket.layout.dtype)

    def _weights(self, bucket: Bucket, members: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Where they are remembered, and they themselves."""
        pairs = zip(self._places[bucket.index], members, strict=True)
        chosen = [(place, member) for place, member in pairs if place is not None]
        return [place for place, _ in chosen], [member for _, member in chosen]


def _move_beyond(before: list[Tensor], now: list[Tensor], by: float) -> None:
    """before ← now + by·(now − before)."""
    torch._foreach_sub_(before, now)
    torch._foreach_mul_(before, -by)
    torch._foreach_add_(before, now)


def is_weight(name: str) -> bool:
    """And not what an optimizer remembers of one, nor a buffer, which no update changes (a forward pass in a closure may)."""
    whole, _ = part_of(name)
    return weight_of(whole) == whole and not is_buffer(whole)
