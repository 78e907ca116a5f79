"""Landing: what exchanges bring is added to the weights."""

from collections.abc import Sequence
from itertools import compress

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gossamer.algorithms.difference import Difference
from gossamer.buckets import Bucket


def add(members: Sequence[Tensor], delta: Tensor | Difference, bucket: Bucket) -> None:
    """Add a bucket's ``delta`` to ``members``, the tensors that it was made of."""
    if not isinstance(delta, Difference):
        torch._foreach_add_(list(members), bucket.split(delta))
        return
    known = len(delta.theirs) == 1 and bucket.flat.is_cpu and (bucket.layout.dtype, bucket.flat.dtype) in _IN_ONE_PASS
    whole = [known and member.dtype == bucket.layout.dtype and member.is_contiguous() for member in members]
    if any(whole):
        _in_one_pass(members, delta, bucket, whole)
    if not all(whole):
        rest = [not done for done in whole]
        parts = bucket.split(delta.computed(bucket.layout.dtype))
        torch._foreach_add_(list(compress(members, rest)), list(compress(parts, rest)))


_IN_ONE_PASS = {
    (torch.float32, torch.float32): (np.float32, torch.float32),
    (torch.float64, torch.float64): (np.float64, torch.float64),
    (torch.float32, torch.bfloat16): (np.float32, torch.int16),
}
"""For types of weights and messages: that of the weights for numpy, and the one in which messages are shown to it."""


def _in_one_pass(members: Sequence[Tensor], delta: Difference, bucket: Bucket, which: Sequence[bool]) -> None:
    """Members without gaps in the host's memory, and what one partner sent."""
    from gossamer.sync.loops import add_bf16_difference, add_difference

    kind, shown = _IN_ONE_PASS[bucket.layout.dtype, bucket.flat.dtype]
    add_to = add_bf16_difference if shown == torch.int16 else add_difference
    chosen, segments = list(compress(members, which)), compress(bucket.segments, which)
    addresses = np.array([member.data_ptr() for member in chosen], np.int64)
    offsets, sizes = np.array([(segment.offset, segment.numel) for segment in segments], np.int64).T.copy()
    theirs, mine = (message.view(shown).numpy() for message in (delta.theirs[0], delta.mine))
    add_to(addresses, offsets, sizes, theirs, mine, kind(delta.share))
    increment_version(chosen)  # autograd does not see what is written to an address
