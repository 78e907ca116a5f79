"""Pending: results of exchanges of weights on their way to the weights, and when each is added."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.blocks.difference import Difference, computed
from gossamer.buckets import Bucket
from gossamer.engine.apply import apply
from gossamer.engine.bucket_states import Kept

PENDING = "(pending"
"""What the names begin with under which results that are not added yet are saved, beside the algorithm's own names."""

_SAVED = re.compile(re.escape(PENDING) + r"(?: until (\d+)(?:, merge (\S+))?)?\)")


@dataclass(slots=True)
class Pending:
    """One bucket's exchange, from its launch until its result is added.

    ``until``: the step of the optimizer at which it is. ``merge``: where the result is weights to merge with
    (``Beat.merge``), their share, and ``sent`` the weights that were sent, until these are known.
    """

    until: int
    merge: float | None = None
    sent: Tensor | None = None
    result: Difference | None = None

    def arrived(self, result: Tensor | Difference) -> None:
        """The exchange has ended."""
        if self.sent is not None:
            result, self.sent = self.sent.add_(computed(result, self.sent.dtype)), None
        self.result = Difference.of(result)

    def add_to(self, members: Sequence[Tensor], bucket: Bucket) -> None:
        """Add the result to ``members``, the tensors of the bucket."""
        assert self.result is not None
        if self.merge is None:
            apply(members, self.result, bucket)
        else:
            torch._foreach_lerp_(list(members), bucket.split(computed(self.result, bucket.layout.dtype)), 1 - self.merge)

    def added(self, flat: Tensor) -> Tensor:
        """``flat``, a copy of the weights of the bucket, with the result added in place."""
        assert self.result is not None
        result = computed(self.result, flat.dtype)
        return flat.add_(result) if self.merge is None else flat.lerp_(result, 1 - self.merge)


def saved(pending: Mapping[int, Pending], buckets: Sequence[Bucket], following: int) -> Kept:
    """All of them by name and parameter; all have arrived. ``following``: the optimizer's next step."""
    kept: Kept = {}
    for index, each in pending.items():
        bucket = buckets[index]
        assert each.result is not None
        merge = "" if each.merge is None else f", merge {each.merge!r}"
        when = "" if each.until == following and not merge else f" until {each.until}{merge}"
        flat = computed(each.result, bucket.layout.dtype)
        kept.setdefault(f"{PENDING}{when})", {}).update(zip(bucket.layout.names, bucket.split(flat), strict=True))
    return kept


def loaded(kept: Mapping[str, Mapping[str, Tensor]], buckets: Sequence[Bucket], following: int) -> dict[int, Pending]:
    """What :func:`saved` has of these buckets."""
    found: dict[int, Pending] = {}
    for name, tensors in kept.items():
        match = _SAVED.fullmatch(name)
        for bucket in buckets if match is not None else ():
            assert match is not None
            flat = bucket.gather(tensors)
            if flat is not None:
                merge = None if match[2] is None else float(match[2])
                found[bucket.index] = Pending(int(match[1] or following), merge, result=Difference.of(flat))
    return found
