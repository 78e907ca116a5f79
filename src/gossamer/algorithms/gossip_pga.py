"""GossipPGA: gossip, and now and then the exact average of all workers."""

from dataclasses import dataclass
from typing import Any

import torch

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.mean import way_to_mean
from gossamer.algorithms.blocks.meeting import check_steps
from gossamer.algorithms.cadence import Cadence, every
from gossamer.algorithms.gossip import Gossip
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
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
    def cadence(self) -> Cadence:
        return every(self.every, lag=self.lag, topology=self.topology, ahead=self.ahead, exchanges=self.period)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # the average over all is made of the weights themselves

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        if ctx.step // self.every % self.period:
            return (yield from super().exchange(bucket, state, ctx))
        return (yield from way_to_mean(bucket, ctx))
