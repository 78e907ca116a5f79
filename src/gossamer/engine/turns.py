"""Turns: whose weights are exchanged next, where several optimizers take steps of their own.

Exchanges meet by their order, and buckets of two optimizers may be of one size: a rank that leaves out a step of one of them
would have its weights averaged with those of another one. So each exchange begins with the number of its optimizer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gossamer.algorithms.base import Context
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, all_gather, decide
from gossamer.errors import DisagreementError
from gossamer.state import State

REMEMBERED = 256
"""Of how many exchanges the order is kept, to know how it goes on."""


def in_turn(number: int, exchange: Callable[..., Flow[Any]], bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
    """``exchange`` of weights of optimizer ``number``, once all ranks have said that it is that one's.

    Raises:
        DisagreementError: on every rank, if it is not; no weight has changed then.
    """
    everyone = yield from all_gather(torch.tensor([number], device=bucket.flat.device))
    numbers: list[int] = yield decide("whose turn", [number], lambda: everyone.flatten().tolist())
    if set(numbers) != {number}:
        said = ", ".join(f"rank {rank} those of optimizer {each}" for rank, each in enumerate(numbers))
        raise DisagreementError(
            f"rank {ctx.rank}: ranks exchange weights of different optimizers: {said} (here the first parameter is "
            f"{bucket.segments[0].name!r}). Where weights travel, optimizers take their steps in one order on all ranks: leave "
            "out a batch in all of them or in none"
        )
    return (yield from exchange(bucket, state, ctx))


def following(turns: Sequence[int]) -> int | None:
    """What comes next in a sequence that repeats itself: what followed where its longest end stood before; None if it did
    not."""
    longest, found = 0, None
    for place in range(len(turns) - 2, -1, -1):
        length = 0
        while length <= place and turns[place - length] == turns[-1 - length]:
            length += 1
        if length > longest:
            longest, found = length, turns[place + 1]
    return found
