"""GossipPGA: gossip, and now and then the exact average of all workers."""

from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.gossip import Gossip
from gossamer.algorithms.meeting import check_steps
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, all_reduce, maximum
from gossamer.memory import portions, wide
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class GossipPGA(Gossip):
    """As :class:`Gossip`, but every ``period``-th exchange is the average over all workers, in full precision.

    Replicas are equal after it, to the rounding of a sum (with ``ahead``, after the next update, and as far as that was
    foreseen), so that they never drift further apart than ``period`` exchanges let them: for many workers, sparse topologies,
    or data that differ between workers. What is summed are weights, p of them: between two averages their mean is to move by
    more than p·2⁻²⁴ of a weight, or rounding swallows it.

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
        delta = (yield from all_reduce(share)).sub_(weights)
        # What may be the rounding of a sum is no difference: workers that agree stay where they are, to the bit. But they all
        # do, or none: a difference that only some of them left out would be lost from the mean.
        differs = yield from maximum(beyond_rounding(delta, weights, ctx.world), ctx.world)
        return delta.mul_(differs).to(bucket.flat.dtype)


def beyond_rounding(delta: Tensor, weights: Tensor, world: int) -> Tensor:
    """``float32[1]``: 1 if any element of ``delta`` is more than a sum of ``world`` equal weights may be rounded by; else 0."""
    rounding = world * torch.finfo(weights.dtype).eps
    within = [
        (change.abs() <= own.abs().mul_(rounding)).all()  # what is not finite is not
        for change, own in portions(delta, weights)
    ]
    return (~torch.stack(within).all()).float().reshape(1)
