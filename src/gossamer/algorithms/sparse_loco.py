"""SparseLoCo: outer deltas of which each worker sends an eighth, in fourteen bits an element."""

from dataclasses import dataclass, field

from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, changeable
from gossamer.algorithms.blocks import outer
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.algorithms.diloco import DiLoCo
from gossamer.buckets import Bucket
from gossamer.codecs.top_per_chunk import TopPerChunk
from gossamer.comm.ops import Flow
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(DiLoCo):
    """:class:`DiLoCo` of whose outer deltas each worker sends what is largest: of every 4,096 elements 491, each in 2 bits and
    12 for its place (:class:`~gossamer.codecs.TopPerChunk`). A message that is longer than the median of all counts only with
    that length.

    What is not sent, e, stays in the worker's own weights (``keep_unsent``): it begins again at x - e, and sends e with what it
    learns from there, Δ = x - e - w. Replicas differ by what they have not sent; without momentum, at rate 1 and without
    clipping their mean is that of :class:`LocalSGD`. With ``keep_unsent=False`` all begin again at x, and e is added to the
    next Δ, as in the paper: then each period learns again what is in e already, and with an outer momentum steps become too
    long.

    The paper has 64 elements of 4,096, e faded by 0.95, ``rate=1.0`` and no momentum. Defaults are others because of a small
    GPT (4 workers, 57 outer steps of 30 after 300 dense ones, one seed; DiLoCo 1.576 nats, all-reduce 1.628): the paper's
    1.931; with 256 elements and ``keep_unsent=False`` 1.627 at ``rate=3.0``, 1.654 at 1.0 and momentum 0.7, 1.740 with
    DiLoCo's optimizer; with ``keep_unsent`` 1.596. Defaults end at 1.587 in three seeds, DiLoCo at 1.575.

    Per exchange p - 1 messages of 1.7 bits per weight, to all others: with 4 workers and ``every=30`` a worker sends a 280th of
    what an exact all-reduce of every step does, with 8 a 140th. Memory: DiLoCo's, and a residual if it is not kept so.
    ``averaging=Gathered(…)`` of :mod:`gossamer.algorithms.blocks.gathered` has the codec, the decay and the clipping as fields.

    Not the choice among hundreds of workers, where every worker receives what all others send: put :class:`Hierarchical`
    around it. Nor where replicas must be equal after an exchange, or where the link carries 2 to 4 bits of each element, none
    of which needs a place: ``DiLoCo(averaging=ScatterReduce(codec=Quantize(bits=4)))`` loses less.

    Source: Sarfi et al. 2025 (arXiv 2508.15706); ``keep_unsent`` is ours.
    """

    every: int = changeable(30)
    rate: float = changeable(1.5)
    momentum: float = changeable(0.6)
    averaging: Algorithm = field(default_factory=lambda: Gathered(codec=TopPerChunk(density=0.12), clip=True, residual="fp32"))
    keep_unsent: bool = True

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        had = self._kept(state)
        if had is None:
            difference = yield from super().exchange(bucket, state, ctx)
        else:  # what a worker has learned is its way from x - e; e is no part of it, and counts as it is, whatever Δ counts
            difference = yield from super().exchange(bucket.holding(wide(bucket.flat) + had), state, ctx)
            difference = wide(difference).add_(had)
        unsent = self._kept(state)
        return (difference if unsent is None else wide(difference).sub_(unsent)).to(bucket.flat.dtype)

    def _kept(self, state: State) -> Tensor | None:
        """By how much this worker's weights are behind those at which all begin: its residual, as far as that stays."""
        unsent = state.scoped(outer.AVERAGING).get(RESIDUAL) if self.keep_unsent else None
        return None if unsent is None else wide(unsent) * getattr(self.averaging, "decay", 1.0)
