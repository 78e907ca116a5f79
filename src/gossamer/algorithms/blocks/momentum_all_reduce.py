"""MomentumAllReduce: the exact mean, with the momentum that was taken out of the optimizer."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Context
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket, Segment
from gossamer.comm.ops import Flow
from gossamer.memory import wide
from gossamer.state import MOMENTUM, State


@dataclass(frozen=True, kw_only=True)
class MomentumAllReduce(AllReduce, register=False):
    """For the parameters that a sparse algorithm with momentum correction does not handle: u ← momentum·u + mean."""

    momentum: float

    @property
    def traits(self) -> Traits:
        return replace(super().traits, exact=False)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        mean = yield from super().exchange(bucket, state, ctx)
        state[MOMENTUM] = torch.add(wide(mean), state[MOMENTUM], alpha=self.momentum)
        return mean.copy_(state[MOMENTUM])

    def put_back(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        return super().put_back(without_momentum(mean, place, state, self.momentum), place, state, ctx)


def without_momentum(mean: Tensor, place: Segment, state: State, momentum: float) -> Tensor:
    """Leave u as it was, as SGD does where there is no gradient: undo u ← momentum·u, which is all that zeros did to this part.

    Returns what of the result's part ``mean`` was not u's own: that had not been sent, and is kept again.
    """
    velocity = state.written(MOMENTUM)
    if velocity is None:
        return mean
    before = place.view(velocity)
    rest = mean - before
    before.div_(momentum)
    return rest
