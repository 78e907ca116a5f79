"""Landing: what exchanges bring is added to the weights."""

import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.difference import IN_ONE_PASS, Difference
from gossamer.buckets import Bucket, Segment
from gossamer.memory import widened

Array = npt.NDArray[Any]

MANY = 2**20
"""Elements of a weight from which on several threads add faster, together, than a loop of one."""

FEW_THREADS = 4
"""As many of torch's threads as do not."""


def prepare(algorithm: Algorithm, tensors: Mapping[str, Tensor]) -> None:
    """Compile the loops by which what ``algorithm`` brings to ``tensors`` is added, or what it sends is foreseen, if it needs
    them. That takes every rank another time: for before they meet, not for afterwards or amid a step."""
    part = algorithm.part("weights")
    if part is None:
        return
    ahead = any(part.ahead_at(step) for step in (0, *part.changes)) and any(tensor.is_cpu for tensor in tensors.values())
    if ahead or any(
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
    layout = bucket.layout
    known = len(delta.theirs) == 1 and (layout.dtype, delta.mine.dtype) in IN_ONE_PASS
    loops = compiled_loops() if known and delta.mine.is_cpu else None
    found = spots(members, bucket) if loops is not None else [None] * len(members)
    for member, segment, spot in zip(members, bucket.segments, found, strict=True):
        if spot is None:
            add_one(member, delta, segment, layout.dtype)
    chosen = [spot for spot in found if spot is not None]
    if loops is not None and chosen:
        _add_at_once(loops, chosen, delta, layout.dtype)
        # Autograd does not see what is written to an address.
        increment_version([member for member, spot in zip(members, found, strict=True) if spot is not None])


Spot = tuple[int, int, int]
"""A member's address, where its place in the bucket begins, and its elements."""


def spots(members: Sequence[Tensor], bucket: Bucket) -> list[Spot | None]:
    """Of each of a bucket's ``members``, for a loop of one thread over memory; None where it had better be left to torch.

    A weight may lie elsewhere, and otherwise, than when its place was made. A large one is for several threads.
    """
    dtype, most = bucket.layout.dtype, MANY if torch.get_num_threads() > FEW_THREADS else sys.maxsize
    return [
        (member.data_ptr(), segment.offset, segment.numel)
        if segment.numel < most
        and member.is_cpu
        and member.dtype == dtype
        and member.stride() == segment.stride
        and member.shape == segment.shape
        else None
        for member, segment in zip(members, bucket.segments, strict=True)
    ]


def in_columns(chosen: Sequence[Spot]) -> Sequence[Array]:
    """Addresses, offsets and sizes: ``int64[members]`` each."""
    return list(np.array(chosen, np.int64).T.copy())


def add_one(member: Tensor, delta: Difference, segment: Segment, dtype: torch.dtype) -> None:
    """Add what ``delta`` brings to one member; ``dtype``: the bucket's."""
    part = Difference(segment.view(delta.mine), [segment.view(message) for message in delta.theirs], delta.share)
    member.add_(part.computed(dtype))


def _add_at_once(loops: ModuleType, chosen: Sequence[Spot], delta: Difference, dtype: torch.dtype) -> None:
    """To weights that lie in the host's memory as the messages do."""
    narrow = delta.mine.dtype == torch.bfloat16
    shown, add_to = (torch.int16, loops.add_bf16_difference) if narrow else (dtype, loops.add_difference)
    theirs, mine = (message.view(shown).numpy() for message in (delta.theirs[0], delta.mine))
    add_to(*in_columns(chosen), theirs, mine, (np.float64 if dtype == torch.float64 else np.float32)(delta.share))


@cache
def compiled_loops() -> ModuleType | None:
    """The loops, compiled; None where they cannot be, which is told once."""
    try:
        from gossamer.sync import loops

        nothing = [np.zeros(0, np.int64)] * 3
        loops.add_bf16_difference(*nothing, np.zeros(0, np.int16), np.zeros(0, np.int16), np.float32(0))
        loops.add_difference(*nothing, np.zeros(0, np.float32), np.zeros(0, np.float32), np.float32(0))
        loops.lay_ahead(*nothing, np.zeros(0, np.float32), np.zeros(0, np.float32), np.float32(0))
        loops.lay_bf16_ahead(*nothing, np.zeros(0, np.float32), np.zeros(0, np.int16), np.float32(0))
    except Exception as reason:  # compilers raise what they like
        warnings.warn(
            f"averages of weights are added in plain torch, more slowly: numba cannot be used ({reason})", stacklevel=2
        )
        return None
    return loops
