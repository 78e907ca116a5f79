"""Ahead: messages of weights in which the next update is foreseen, so that averages are as old as the weights they change."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from gossamer.buckets import Bucket, is_buffer
from gossamer.pieces import part_of
from gossamer.sync.history import weight_of
from gossamer.sync.landing import Array, compiled_loops, in_columns, spots


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
        self._places = {}
        self.drop()

    def drop(self) -> None:
        """What is remembered is of an update that is over."""
        self._remembered = set()

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

    def lay_out(self, bucket: Bucket, members: Sequence[Tensor], by: float) -> None:
        """Lay ``members`` into their bucket: w + by·(w − w before the update), if there was one."""
        if bucket.index not in self._remembered:
            torch._foreach_copy_(bucket.views, list(members))
        elif (found := self._in_one_pass(bucket, members)) is not None:
            loops, columns = found
            narrow = bucket.flat.dtype == torch.bfloat16
            lay, shown = (loops.lay_bf16_ahead, torch.int16) if narrow else (loops.lay_ahead, torch.float32)
            lay(*columns, self._memory(bucket).numpy(), bucket.flat.view(shown).numpy(), np.float32(by))
        else:
            before, now = self._weights(bucket, members)
            _move_beyond(before, now, by)
            places = self._places[bucket.index]
            laid = [member if place is None else place for place, member in zip(places, members, strict=True)]
            torch._foreach_copy_(bucket.views, laid)

    @staticmethod
    def _memory(bucket: Bucket) -> Tensor:
        return bucket.scratch("before the update", bucket.layout.dtype)

    def _in_one_pass(self, bucket: Bucket, members: Sequence[Tensor]) -> tuple[ModuleType, Sequence[Array]] | None:
        """The loops, for float32 weights and messages of float32 or bfloat16, and where the members lie; None if any does not
        fit."""
        whole = all(place is not None for place in self._places[bucket.index])
        types = bucket.layout.dtype == torch.float32 and bucket.flat.dtype in (torch.float32, torch.bfloat16)
        if not whole or not types or not bucket.flat.is_cpu:
            return None
        loops, found = compiled_loops(), spots(members, bucket)
        chosen = [spot for spot in found if spot is not None]
        return (loops, in_columns(chosen)) if loops is not None and len(chosen) == len(found) else None

    def _weights(self, bucket: Bucket, members: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Where they are remembered, and they themselves."""
        pairs = zip(self._places[bucket.index], members, strict=True)
        chosen = [(place, member) for place, member in pairs if place is not None]
        return [place for place, _ in chosen], [member for _, member in chosen]


def _move_beyond(before: list[Tensor], now: list[Tensor], by: float) -> None:
    """before ← now + by·(now − before), as the loops round it: ``lerp`` may fuse a product and a sum, or not, by processor."""
    torch._foreach_sub_(before, now)
    torch._foreach_mul_(before, -by)
    torch._foreach_add_(before, now)


def is_weight(name: str) -> bool:
    """And not what an optimizer remembers of one, nor a buffer, which no update changes (a forward pass in a closure may)."""
    whole, _ = part_of(name)
    return weight_of(whole) == whole and not is_buffer(whole)
