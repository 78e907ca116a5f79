"""GossipPGA: gossip, and now and then the exact average of all workers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.gossip import PIECE, Gossip, check_steps
from gossamer.algorithms.lossy import wide
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, all_reduce
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class GossipPGA(Gossip):
    """As :class:`Gossip`, but every ``period``-th exchange is the average over all workers, in full precision.

    Replicas are equal after it, to the rounding of a sum, so that they never drift further apart than ``period``
    exchanges let them: for many workers, sparse topologies, or data that differ between workers.

    Messages and bytes of gossip, and every ``period``-th time those of an all-reduce in full precision. Not the choice where
    a message through the whole ring of workers is what must be avoided.

    Source: Chen et al. 2021 (arXiv 2105.09080).
    """

    period: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("period", self.period)

    @property
    def traffic_period(self) -> int:
        return self.every * self.period

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.step // self.every % self.period:
            return (yield from super().exchange(bucket, state, ctx))
        weights = wide(bucket.flat)  # in 16 bits the rounding of a sum would be as large as what workers differ by
        share = torch.div(weights, ctx.world, out=bucket.fresh() if weights is bucket.flat else None)
        mean = yield from all_reduce(share)
        # What may be the rounding of a sum is no difference: workers that agree stay where they are, to the bit.
        rounding = ctx.world * torch.finfo(mean.dtype).eps
        for delta, own in zip(mean.sub_(weights).split(PIECE), weights.split(PIECE), strict=True):
            delta.masked_fill_(delta.abs() <= own.abs().mul_(rounding), 0)
        return mean.to(bucket.flat.dtype)
