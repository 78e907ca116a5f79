"""Freight: what exchanges of weights bring and send, while an optimizer carries it (``gossamer.optim.carrying``)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import TypeGuard

import numpy as np
import torch
from torch import Tensor

from gossamer.algorithms.difference import Difference
from gossamer.buckets import Bucket
from gossamer.optim.carrying import Array, Legs
from gossamer.sync import landing
from gossamer.sync.ahead import Ahead, is_weight

Adding = Callable[[], AbstractContextManager[None]]


def of_one_message(delta: Tensor | Difference) -> TypeGuard[Difference]:
    """Whether an optimizer can add it: what one partner's message in bfloat16 brings, or nothing."""
    return isinstance(delta, Difference) and delta.mine.dtype == torch.bfloat16 and len(delta.theirs) <= 1


@dataclass(frozen=True, slots=True)
class Load:
    """Of one bucket: ``delta``, if there is one, is added to its ``members``; the bucket's message is written ``by`` updates
    ahead, if it is to be written. ``rows``: see :meth:`Manifest.rows`."""

    bucket: Bucket
    members: Sequence[Tensor]
    rows: Array
    delta: Difference | None
    by: float | None

    @property
    def addresses(self) -> tuple[int, int, int]:
        """Of the partner's message, one's own, and the one to be written; 0 where there is none."""
        message = 0 if self.by is None else self.bucket.flat.data_ptr()
        if self.delta is None or not self.delta.theirs:
            return 0, 0, message
        return self.delta.theirs[0].data_ptr(), self.delta.mine.data_ptr(), message

    @property
    def numbers(self) -> tuple[float, float]:
        """The share of the difference, and how far ahead."""
        return 0.0 if self.delta is None else self.delta.share, self.by or 0.0


class Stowage:
    """The members of several loads, as stretches of whole weights: by weight, and in each from its first element on."""

    def __init__(self, loads: Sequence[Load]) -> None:
        owners, starts, sizes, offsets = np.concatenate([load.rows for load in loads], axis=1)
        self.counts = [load.rows.shape[1] for load in loads]
        """Members of each load."""
        bases = np.repeat(np.array([load.addresses for load in loads], np.int64), self.counts, axis=0)
        places = np.where(bases != 0, bases + 2 * offsets[:, None], 0)
        numbers = np.repeat(np.array([load.numbers for load in loads], np.float32), self.counts, axis=0)
        self.order = np.lexsort((starts, owners))
        """Which member, of all loads one after the other, each stretch is."""
        self.owners = owners[self.order]
        self._rows, self._numbers = np.column_stack([starts, sizes, places])[self.order], numbers[self.order]
        self._found, self._all = Legs.none(0), False
        self._asked = self._found.first

    def legs(self, addresses: Array) -> tuple[Legs, bool]:
        """Those of the weights at these addresses, and whether these are all. Who asks has, mostly, the same each time."""
        if addresses is not self._asked and not np.array_equal(addresses, self._asked):
            first, last = (np.searchsorted(self.owners, addresses, side) for side in ("left", "right"))
            self._found = Legs(first, last, self._rows, self._numbers)
            self._all = bool(np.isin(self.owners, addresses).all())
        self._asked = addresses
        return self._found, self._all


class Manifest:
    """Where the members of each bucket lie, and how loads are stowed: found once, and again when anything has moved."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[list[object], Array | None]] = {}
        self._stowed: dict[tuple[object, ...], Stowage] = {}

    def rows(self, bucket: Bucket, members: Sequence[Tensor], wholes: Sequence[Tensor]) -> Array | None:
        """``int64[4, members]``: the address of the whole tensor, the element of it at which the member begins, the member's
        elements, and where its place in the bucket begins. None if an optimizer cannot carry the bucket: it carries bfloat16
        messages of float32 weights in the host's memory."""
        if bucket.layout.dtype != torch.float32 or bucket.flat.dtype != torch.bfloat16 or not bucket.flat.is_cpu:
            return None
        seen: list[object] = [*map(Tensor.data_ptr, wholes), *map(Tensor.data_ptr, members), *map(Tensor.stride, members)]
        seen += [*map(_shape, members), *map(_dtype, members)]
        known = self._found.get(bucket.index)
        if known is None or known[0] != seen:
            self._stowed = {}
            known = self._found[bucket.index] = seen, _rows(bucket, members, wholes)
        return known[1]

    def stowed(self, loads: Sequence[Load]) -> Stowage:
        """In the same memory, step by step, the same loads come again."""
        key = tuple((load.bucket.index, load.addresses, load.numbers) for load in loads)
        if key not in self._stowed:
            if len(self._stowed) == _MOST_STOWED:
                self._stowed = {}
            self._stowed[key] = Stowage(loads)
        return self._stowed[key]


_MOST_STOWED = 64
_shape, _dtype = attrgetter("shape"), attrgetter("dtype")


def _rows(bucket: Bucket, members: Sequence[Tensor], wholes: Sequence[Tensor]) -> Array | None:
    found = landing.spots(members, bucket)
    chosen = [spot for spot in found if spot is not None]
    if len(chosen) < len(found):
        return None
    addresses, offsets, sizes = landing.in_columns(chosen)
    owners = np.array(list(map(Tensor.data_ptr, wholes)), np.int64)
    return np.stack([owners, (addresses - owners) // 4, sizes, offsets])


class Freight:
    """Loads on board of one optimizer's step. What it does not take is done as without it."""

    def __init__(self, loads: Sequence[Load], manifest: Manifest, ahead: Ahead, adding: Adding = nullcontext) -> None:
        """``adding``: a context in which whatever the optimizer does not take is added."""
        self._loads, self._ahead, self._adding, self._stowage = loads, ahead, adding, manifest.stowed(loads)
        self._taken: Array | None = np.zeros(len(self._stowage.owners), np.bool_)
        """Which stretches; None: all."""
        self._unloaded = False

    @property
    def sent(self) -> set[int]:
        """The buckets whose messages are written."""
        return {load.bucket.index for load in self._loads if load.by is not None}

    def take(self, addresses: Array) -> Legs:
        """What the optimizer does to the weights at these addresses."""
        if self._unloaded:
            return Legs.none(len(addresses))
        legs, are_all = self._stowage.legs(addresses)
        if are_all:
            self._taken = None
        elif self._taken is not None:
            self._taken |= np.isin(self._stowage.owners, addresses)
        return legs

    def unload(self) -> None:
        """Add what was not taken, and remember the weights of which it was not: they are sent after an update, if any comes."""
        if self._unloaded:
            return
        self._unloaded = True
        rest = [(load, left) for load, left in zip(self._loads, self._left(), strict=True) if left]
        brought = [(load, load.delta, left) for load, left in rest if load.delta is not None and load.delta.theirs]
        if brought:
            with self._adding():
                for load, delta, left in brought:
                    for index in left:
                        landing.add_one(load.members[index], delta, load.bucket.segments[index], load.bucket.layout.dtype)
        for load, left in rest:
            if load.by and any(is_weight(load.bucket.segments[index].name) for index in left):
                self._ahead.remember(load.bucket, load.members)

    def drop(self) -> None:
        """Do nothing of all this any more: the weights are others."""
        self._unloaded = True

    def lay_out(self) -> set[int]:
        """Write those messages, or parts of them, that the optimizer did not. Returns the buckets that hold them now."""
        self.unload()
        for load, left in zip(self._loads, self._left(), strict=True):
            if left and load.by is not None:
                self._ahead.lay_out(load.bucket, load.members, load.by, left)
        return self.sent

    def _left(self) -> list[list[int]]:
        """Of each load, which members were not taken."""
        if self._taken is None:
            return [[] for _ in self._loads]
        taken = np.empty_like(self._taken)
        taken[self._stowage.order] = self._taken
        return [np.flatnonzero(~each).tolist() for each in np.split(taken, np.cumsum(self._stowage.counts)[:-1])]
