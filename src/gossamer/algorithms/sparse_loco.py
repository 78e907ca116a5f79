"""SparseLoCo: outer deltas of which each worker sends the largest third, in two bits an element."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, changeable
from gossamer.algorithms.blocks import outer
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.algorithms.diloco import DiLoCo
from gossamer.buckets import Bucket
from gossamer.codecs.top_per_chunk import TopPerChunk
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(DiLoCo):
    """:class:`DiLoCo` of whose outer deltas each worker sends what is largest: of every 4,096 elements 1,352, each in 2 bits,
    and of each one bit that says whether it is sent (:class:`~gossamer.codecs.TopPerChunk`): ``e ← decay·e + Δ``,
    ``ê = Q(e)``, ``e ← e - ê``, and the mean of all ê is the gradient of the outer step. A message that is longer than the
    median of all counts only with that length.

    What is not sent, e, stays in the worker's own weights (``keep_unsent``): it begins again at x - e, and sends e with what it
    learns from there, Δ = x - e - w. Replicas differ by what they have not sent; without momentum, at rate 1 and without
    clipping their mean is that of :class:`LocalSGD`. With ``keep_unsent=False`` all begin again at x, and e is added to the
    next Δ, as in the paper: then each period learns again what is in e already.

    The paper has 64 elements of 4,096, e faded by 0.95, ``rate=1.0`` and no momentum. Defaults are others because of a small
    GPT (4 workers, 57 outer steps of 30 after 300 dense ones): the paper's end at 1.930 nats, these at 1.576, DiLoCo at
    1.575, an all-reduce at 1.630 (three seeds). With fewer elements longer steps and less momentum are best: an eighth ends at
    1.587 at rate 1.5 and momentum 0.6.

    Per exchange p - 1 messages of 1.7 bits per weight, to all others: with 4 workers and ``every=30`` a worker sends a 280th of
    what an exact all-reduce of every step does, with 8 a 140th. Memory: DiLoCo's, and a residual.
    ``averaging=Gathered(…)`` of :mod:`gossamer.algorithms.blocks.gathered` has the codec, the decay and the clipping as fields.

    Not the choice among more than a few workers, where every worker receives what all others send:
    ``DiLoCo(averaging=ScatterReduce(codec=Quantize(bits=2), decay=0.9))`` sends a 450th for any number of them, and ends at
    1.579 there (three seeds). Nor where replicas must be equal after an exchange.

    Source: Sarfi et al. 2025 (arXiv 2508.15706); ``keep_unsent`` is ours.
    """

    every: int = changeable(30)
    rate: float = changeable(0.8)
    momentum: float = changeable(0.85)
    averaging: Algorithm = field(default_factory=lambda: Gathered(codec=TopPerChunk(density=0.33), clip=True, residual="fp32"))
    keep_unsent: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.keep_unsent, bool):
            raise ConfigurationError(f"keep_unsent must be True or False; got {self.keep_unsent!r}")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        had = self._unsent(bucket, state, ctx)
        if had is None:
            difference = yield from super().exchange(bucket, state, ctx)
        else:  # what a worker has learned is its way from x - e; e is no part of it, and counts as it is, whatever Δ counts
            difference = yield from super().exchange(bucket.holding(wide(bucket.flat) + had), state, ctx)
            difference = wide(difference).add_(had)
        unsent = self._unsent(bucket, state, ctx)
        return (difference if unsent is None else wide(difference).sub_(unsent)).to(bucket.flat.dtype)

    def _unsent(self, bucket: Bucket, state: State, ctx: Context) -> Tensor | None:
        """By how much this worker's weights are behind those at which all begin: what the average has not sent."""
        if not self.keep_unsent:
            return None
        nothing = torch.zeros_like(wide(bucket.flat))
        unsent = self.averaging.hand_over(nothing, state.scoped(outer.AVERAGING), ctx)
        return None if unsent is nothing else unsent
