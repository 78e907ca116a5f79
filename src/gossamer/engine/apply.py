"""Apply: weights are packed into their buckets; what exchanges bring is pending for some steps, and then added to them."""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.difference import Difference, computed
from gossamer.buckets import Bucket
from gossamer.codecs.wire import narrow
from gossamer.memory import momentary, widened

Array = npt.NDArray[Any]

_COMPILED = {(torch.float32, torch.float32), (torch.float64, torch.float64), (torch.float32, torch.bfloat16)}
"""Of which types weights and messages are that a compiled loop adds."""

MANY = 2**20
"""Elements of a bucket from which on several threads of torch's add faster, together, than a loop of one."""

FEW_THREADS = 4
"""As many of torch's threads as do not."""


def prepare(algorithm: Algorithm, tensors: Mapping[str, Tensor]) -> None:
    """Compile the loops by which what ``algorithm`` brings to ``tensors`` is added, if it needs them. That takes every rank
    another time: for before they meet, not for afterwards or amid a step."""
    part = algorithm.part("weights")
    if part is not None and any(
        tensor.is_cpu and (widened(tensor.dtype), part.message_dtype(widened(tensor.dtype))) in _COMPILED
        for tensor in tensors.values()
    ):
        compiled_loops()


def pack(bucket: Bucket, members: Sequence[Tensor]) -> None:
    """Copy ``members``, tensors like the bucket's segments, into the bucket, in the type of the message."""
    if bucket.flat.dtype == torch.float16 != bucket.layout.dtype:
        for view, member in zip(bucket.views, members, strict=True):
            narrow(view, member)
    else:
        torch._foreach_copy_(bucket.views, list(members))


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
        self.result = Difference(None, [result]) if isinstance(result, Tensor) else result

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


def apply(members: Sequence[Tensor], difference: Difference, bucket: Bucket) -> None:
    """Add what an exchange brought to ``members``, the tensors that the bucket was packed from. The bucket may use the memory
    of a tensor again that came without a message of its own."""
    if difference.mine is None:
        torch._foreach_add_(list(members), bucket.split(difference.theirs[0]))
        bucket.recycle(difference.theirs[0])
    elif difference.theirs and not _apply_compiled(members, difference, difference.mine, bucket):
        total = difference.into(momentary(bucket.flat.numel(), bucket.layout.dtype, bucket.layout.device))
        torch._foreach_add_(list(members), bucket.split(total))


def _apply_compiled(members: Sequence[Tensor], difference: Difference, mine: Tensor, bucket: Bucket) -> bool:
    """Add one partner's message in one pass over the host's memory, to the same bits as without; whether that could be."""
    dtype, message = bucket.layout.dtype, mine.dtype
    few = bucket.flat.numel() < MANY or torch.get_num_threads() <= FEW_THREADS
    if len(difference.theirs) > 1 or (dtype, message) not in _COMPILED or not few or not _lie_as_packed(members, bucket):
        return False
    loops = compiled_loops()
    if loops is None:
        return False
    rows = [
        (member.data_ptr(), segment.offset, segment.numel) for member, segment in zip(members, bucket.segments, strict=True)
    ]
    columns = np.array(rows, np.int64).reshape(-1, 3).T.copy()
    narrow = message == torch.bfloat16
    shown, add = (torch.int16, loops.add_bf16_difference) if narrow else (dtype, loops.add_difference)
    there, here = (each.view(shown).numpy() for each in (difference.theirs[0], mine))
    add(*columns, there, here, (np.float64 if dtype == torch.float64 else np.float32)(difference.share))
    increment_version(list(members))  # autograd does not see what is written to an address
    return True


def _lie_as_packed(members: Sequence[Tensor], bucket: Bucket) -> bool:
    """Whether they lie on the host in the shapes and strides of the bucket's segments. A weight may have been moved."""
    dtype = bucket.layout.dtype
    return all(
        member.is_cpu and member.dtype == dtype and member.stride() == segment.stride and member.shape == segment.shape
        for member, segment in zip(members, bucket.segments, strict=True)
    )


@cache
def compiled_loops() -> ModuleType | None:
    """The loops, compiled; None where they cannot be, which is told once."""
    try:
        from gossamer.engine import loops

        nothing = [np.zeros(0, np.int64)] * 3
        loops.add_bf16_difference(*nothing, np.zeros(0, np.int16), np.zeros(0, np.int16), np.float32(0))
        for kind in (np.float32, np.float64):
            loops.add_difference(*nothing, np.zeros(0, kind), np.zeros(0, kind), kind(0))
    except Exception as reason:  # compilers raise what they like
        warnings.warn(
            f"averages of weights are added in plain torch, more slowly: numba cannot be used ({reason})", stacklevel=2
        )
        return None
    return loops
