"""SparseLoCo: outer deltas of which each worker sends a sixteenth, in fourteen bits an element."""

from dataclasses import dataclass, field

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.algorithms.diloco import DiLoCo
from gossamer.codecs.top_per_chunk import TopPerChunk


@dataclass(frozen=True, kw_only=True)
class SparseLoCo(DiLoCo):
    """:class:`DiLoCo` without an outer momentum, of whose outer deltas each worker sends what is largest: of every 4,096
    elements 256, each in 2 bits and 12 for its place (:class:`~gossamer.codecs.TopPerChunk`). What is not sent is kept,
    ``e ← 0.95·e + Δ``, and sent later: error feedback takes the place of the momentum. A message that is longer than the median
    of all counts only with that length. ``x ← x - rate·mean``.

    The paper has 64 elements of 4,096 and ``rate=1.0``. More elements and longer outer steps are the defaults because of a
    small GPT (4 workers, 57 outer steps of 30 after 300 dense ones, one seed; DiLoCo 1.576 nats, all-reduce 1.628): the paper's
    1.931, at ``rate=4.0`` 1.715; 256 elements at rates of 1, 3, 5: 1.803, 1.627, 1.639; with DiLoCo's optimizer 1.740. Without
    momentum and at rate 1 no density brings more than :class:`LocalSGD` does, 1.738.

    Per exchange p - 1 messages of 0.88 bits per weight, to all others: with 4 workers and ``every=30`` a worker sends less than
    a five-hundredth of what an exact all-reduce of every step does. Memory: DiLoCo's, and a residual in 16 bits.
    ``averaging=Gathered(…)`` of :mod:`gossamer.algorithms.blocks.gathered` has the codec, the decay and the clipping as fields.

    Not the choice among hundreds of workers, where every worker receives what all others send: put :class:`Hierarchical`
    around it. Nor where the link carries 4 bits: ``DiLoCo(averaging=ScatterReduce(codec=Quantize(bits=4)))`` loses less.

    Source: Sarfi et al. 2025 (arXiv 2508.15706).
    """

    every: int = 30
    rate: float = 3.0
    momentum: float = 0.0
    nesterov: bool = False
    averaging: Algorithm = field(default_factory=lambda: Gathered(codec=TopPerChunk(density=1 / 16), decay=0.95, clip=True))
