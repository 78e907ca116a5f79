"""Ahead: messages of weights in which the next update is foreseen, so that averages are as old as the weights they change."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.buckets import Bucket
from gossamer.pieces import part_of
from gossamer.sync.history import weight_of


class Ahead:
    """Remembers weights from just before an update until they are sent, and sends them as far ahead as is wanted.

    The memory is the bucket's own: as much as its weights, and the same in every step.
    """

    def __init__(self) -> None:
        self._places: dict[int, list[Tensor | None]] = {}
        """By bucket, where its members are remembered; None for those that are sent as they are."""
        self._remembered: set[int] = set()

    def forget(self) -> None:
        """Buckets are others now."""
        self._places, self._remembered = {}, set()

    def remember(self, bucket: Bucket, members: Sequence[Tensor]) -> None:
        """An update is about to be made of ``members``, the tensors that the bucket is made of."""
        if bucket.index not in self._places:
            flat = bucket.scratch("before the update", bucket.layout.dtype)
            self._places[bucket.index] = [
                segment.view(flat) if _is_weight(segment.name) else None for segment in bucket.segments
            ]
        torch._foreach_copy_(*self._weights(bucket, members))
        self._remembered.add(bucket.index)

    def lay_out(self, bucket: Bucket, members: Sequence[Tensor], by: float) -> None:
        """Lay ``members`` into their bucket: w + by·(w − w before the update), if there was one."""
        laid = list(members)
        if bucket.index in self._remembered:
            self._remembered.remove(bucket.index)
            before, now = self._weights(bucket, members)
            torch._foreach_lerp_(before, now, 1 + by)
            places = self._places[bucket.index]
            laid = [member if place is None else place for place, member in zip(places, members, strict=True)]
        torch._foreach_copy_(bucket.views, laid)

    def _weights(self, bucket: Bucket, members: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Where they are remembered, and they themselves."""
        pairs = zip(self._places[bucket.index], members, strict=True)
        places, weights = zip(*((place, member) for place, member in pairs if place is not None), strict=True)
        return list(places), list(weights)


def _is_weight(name: str) -> bool:
    """And not what an optimizer remembers of one."""
    whole, _ = part_of(name)
    return weight_of(whole) == whole
