"""Pending: results of exchanges of weights on their way to the weights, and when each is added."""

import re
from collections.abc import Mapping, Sequence

from torch import Tensor

from gossamer.algorithms.blocks.difference import Difference, computed
from gossamer.buckets import Bucket
from gossamer.engine.apply import Pending
from gossamer.engine.bucket_states import Kept

PENDING = "(pending"
"""What the names begin with under which results that are not added yet are saved, beside the algorithm's own names."""

_SAVED = re.compile(re.escape(PENDING) + r"(?: until (\d+)(?:, merge (\S+))?)?\)")


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
