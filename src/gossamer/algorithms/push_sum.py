"""PushSum: gossip on directed graphs, on which ranks send to and receive from different numbers of others.

The weight is sent along, although all could compute it: so a message that is lost takes its weight with it.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.meeting import Meeting
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.codecs.wire import Wire, check_wire, narrowed
from gossamer.comm.digraph import digraph_at
from gossamer.comm.ops import Flow, Push, start, wait
from gossamer.comm.topology import OnePeerExponential, Pattern
from gossamer.memory import portions, wide
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class PushSum(Meeting):
    """Stochastic gradient push: every worker keeps a sum x and a weight a, both of which it divides into equal parts, one
    for each rank that it sends to and one for itself; the model is their ratio ``x / a``.

    On a graph where some receive more than they send, plain averages would drift towards the ranks that send most. Here
    Σx and Σa over the workers stay what they are, so that all ratios tend to the same ``Σx / Σa``, with every update in
    it in full. Where everyone sends and receives as much, all weights stay 1, and this is :class:`Gossip`.

    So of the models it is the mean by weight, ``Σ a·(x / a) / Σ a``, that moves by the mean of all updates, and that is what
    :meth:`gossamer.Replica.consensus` gives.

    An update enters the sum as it is, so where little weight is at the moment it moves the model further. Running statistics
    cannot stand that: models with buffers need ``buffers="broadcast"`` or ``"local"``. What else changes weights (a clamp, a
    reload) counts as an update. Where a sum is not finite, it begins anew from the weights, so that mended ones stay mended.

    ``topology``: any of :mod:`gossamer.comm.topology`, and the directed ones of :mod:`gossamer.comm.digraph`, such as
    ``RandomPush()`` or ``OutNeighbours(…)`` (a worker behind a slow uplink sends to fewer). ``wire``: what a message rounds
    off stays with its sender. ``every`` and ``lag``: as in :class:`Gossip`.

    Per exchange one message of the weights' size for each edge, and one number. Memory, in copies of the weights: the sum
    before and after an exchange, what was there, what is sent, and one for each of those who are heard.
    Not the choice where partners send as much as they receive: :class:`Gossip` needs one copy.

    Source: Kempe et al. 2003 (FOCS), push-sum; Assran et al. 2019 (arXiv 1811.10792), stochastic gradient push.
    """

    topologies: ClassVar[Any] = Pattern

    wire: Wire = "fp32"
    topology: Pattern = field(default_factory=OnePeerExponential)
    every: int = 1
    lag: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("wire", self.wire)

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", averages_buffers=False, weighted=True)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        graph = digraph_at(self.topology, ctx.step // self.every, ctx.world)
        targets = len(graph.destinations(ctx.rank))
        weights = wide(bucket.flat)
        total, weight = self._with_the_update(weights, state, state.fresh(SUM, weights))
        message = bucket.scratch("sent", narrowed(total.dtype, self.wire))
        torch.div(total, targets + 1, out=message)
        share = (weight / (targets + 1)).reshape(1)
        sums = yield start(Push(message, graph))
        shares = yield start(Push(share, graph))
        total.sub_(message.to(total.dtype), alpha=targets)
        weight = weight / (targets + 1)
        for part in (yield wait(sums)):
            total.add_(part.to(total.dtype))
        weight = weight + (yield wait(shares)).sum()
        state[SUM] = total
        state.set_extra(WEIGHT, weight)
        for own, part in portions(weights, total):
            torch.sub(part / weight, own, out=own)
        return bucket.flat.copy_(weights)  # nothing reads the weights' copy any more

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        weights = wide(flat)
        return self._with_the_update(weights, state, torch.empty_like(weights))[0]

    @staticmethod
    def _with_the_update(weights: Tensor, state: State, out: Tensor) -> tuple[Tensor, Tensor]:
        """The sum, in ``out``, and the weight (one number), with what the optimizer has done to the model since the last
        exchange."""
        weight = state.extra(WEIGHT)
        if weight is None or SUM not in state:
            return out.copy_(weights), torch.ones((), dtype=torch.float64, device=weights.device)
        weight = weight.to(weights.device)  # a checkpoint may have been loaded elsewhere
        before = state[SUM]
        torch.div(before, weight, out=out)
        torch.sub(before, out, out=out).add_(weights)
        for total, own in portions(out, weights):
            torch.where(total.isfinite(), total, own * weight, out=total)
        return out, weight


SUM, WEIGHT = "push-sum", "push-sum weight"
