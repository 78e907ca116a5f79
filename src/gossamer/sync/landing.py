"""Landing: what exchanges bring is added to the weights."""

import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.difference import IN_ONE_PASS, Difference
from gossamer.buckets import Bucket, Segment
from gossamer.memory import widened

MANY = 2**20
"""Elements of a weight from which on several threads add faster, together, than a loop of one."""

FEW_THREADS = 4
"""As many of torch's threads as do not."""


def prepare(algorithm: Algorithm, tensors: Mapping[str, Tensor]) -> None:
    """Compile the loops by which what ``algorithm`` brings to ``tensors`` is added, if it needs them. That takes every rank
    another time: for before they meet, not for afterwards or amid a step."""
    part = algorithm.part("weights")
    if part is not None and any(
        part.of(part.route(name, tensor)).message_dtype(widened(tensor.dtype), tensor.device)
        for name, tensor in tensors.items()
    ):
        compiled_loops()


def add(members: Sequence[Tensor], delta: Tensor | Difference, bucket: Bucket) -> None:
    """Add a bucket's ``delta`` to ``members``, the tensors that it was made of, and offer the bucket its memory."""
    if not isinstance(delta, Difference):
        torch._foreach_add_(list(members), bucket.split(delta))
        bucket.recycle(delta)
        return
    if not delta.theirs:  # nobody was met
        return
    layout, alone = bucket.layout, torch.get_num_threads() <= FEW_THREADS
    known = len(delta.theirs) == 1 and delta.mine.is_cpu and (layout.dtype, delta.mine.dtype) in IN_ONE_PASS
    loops = compiled_loops() if known else None
    chosen: list[Tensor] = []
    places: list[tuple[int, int, int]] = []
    for member, segment in zip(members, bucket.segments, strict=True):
        # A weight may lie elsewhere, and otherwise, than when its place was made.
        fits = member.is_cpu and member.dtype == layout.dtype and member.stride() == segment.stride
        if loops is not None and fits and member.shape == segment.shape and (alone or segment.numel < MANY):
            chosen.append(member)
            places.append((member.data_ptr(), segment.offset, segment.numel))
        else:
            _add_one(member, delta, segment, layout.dtype)
    if loops is not None and chosen:
        _add_at_once(loops, places, delta, layout.dtype)
        increment_version(chosen)  # autograd does not see what is written to an address


def _add_one(member: Tensor, delta: Difference, segment: Segment, dtype: torch.dtype) -> None:
    part = Difference(segment.view(delta.mine), [segment.view(message) for message in delta.theirs], delta.share)
    member.add_(part.computed(dtype))


def _add_at_once(loops: ModuleType, places: list[tuple[int, int, int]], delta: Difference, dtype: torch.dtype) -> None:
    """To weights that lie in the host's memory as the messages do; ``places``: their addresses, offsets and elements."""
    addresses, offsets, sizes = np.array(places, np.int64).T.copy()
    narrow = delta.mine.dtype == torch.bfloat16
    shown, add_to = (torch.int16, loops.add_bf16_difference) if narrow else (dtype, loops.add_difference)
    theirs, mine = (message.view(shown).numpy() for message in (delta.theirs[0], delta.mine))
    add_to(addresses, offsets, sizes, theirs, mine, (np.float64 if dtype == torch.float64 else np.float32)(delta.share))


@cache
def compiled_loops() -> ModuleType | None:
    """The loops, compiled; None where they cannot be, which is told once."""
    try:
        from gossamer.sync import loops

        nothing = [np.zeros(0, np.int64)] * 3
        loops.add_bf16_difference(*nothing, np.zeros(0, np.int16), np.zeros(0, np.int16), np.float32(0))
        loops.add_difference(*nothing, np.zeros(0, np.float32), np.zeros(0, np.float32), np.float32(0))
    except Exception as reason:  # compilers raise what they like
        warnings.warn(
            f"averages of weights are added in plain torch, more slowly: numba cannot be used ({reason})", stacklevel=2
        )
        return None
    return loops
