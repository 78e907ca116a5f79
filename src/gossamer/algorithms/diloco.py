"""DiLoCo: every worker trains alone for many steps, and an outer optimizer takes what all have learned as its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context, changeable
from gossamer.algorithms.blocks import outer
from gossamer.algorithms.blocks.shares import in_line, refuse_two
from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.local_sgd import LocalSGD
from gossamer.algorithms.traits import Traits
from gossamer.bucket_plan import is_buffer
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, Group
from gossamer.memory import wide
from gossamer.pieces import part_of
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """All workers begin at the same weights x, and train alone for ``every`` steps. How far each has come, Δ = x - w, the outer
    delta, is averaged over them, and is the gradient of one step of SGD, from x to where all begin again:
    ``v ← momentum·v + Δ``, ``x ← x - rate·(Δ + momentum·v)``, or ``x ← x - rate·v`` without ``nesterov``.

    ``rate`` 1 and ``momentum`` 0 are :class:`LocalSGD`; ``rate=1.0, momentum=0.5, nesterov=False`` is SlowMo. Where the first
    x is not known (:func:`after`), the first exchange is an average. ``delay``, ``merge``, ``lag``, ``dense``: as there.
    ``averaging``: an algorithm over gradients without a step of its own. ``ScatterReduce(codec=Quantize(bits=4))`` sends an
    eighth of the bytes. Or one over weights: ``Gossip()`` is gossip with an outer optimizer, without any collective: after each
    outer step of workers x and v become averages with their peers', and the mean x makes the mean step. ``outlier``: a worker
    whose ‖Δ‖ in a bucket is not finite (for good), or has a modified z-score above it, is left out with a warning.

    Per exchange the messages and bytes of ``averaging``, with gossip twice those (``outlier``: and two numbers to each worker).
    Memory: x and v before and after it, in full precision, and the state of ``averaging``. Not the choice for few steps alone,
    16-bit weights without ``MasterWeights`` (what x is rounded by counts as learned), or freezing in mid-run: v carries on.

    Source: Douillard et al. 2023 (arXiv 2311.08105); Wang et al. 2019 (1910.00643), SlowMo; gossip: Yu et al. 2019, 1905.03817.
    """

    every: int = changeable(32)
    rate: float = changeable(0.7)
    momentum: float = changeable(0.9)
    nesterov: bool = changeable(True)
    averaging: Algorithm = field(default_factory=AllReduce)
    outlier: float | None = changeable(None)

    def __post_init__(self) -> None:
        super().__post_init__()
        outer.check_optimizer(self.rate, self.momentum, self.nesterov)
        outer.check_averaging(self.averaging, self.outlier)

    def _fields(self) -> dict[str, Algorithm]:
        return {}  # it averages by another, and is not made of it: that one moves gradients

    @property
    def traits(self) -> Traits:
        return replace(super().traits, moves_mean=True, by_samples=not outer.gossips(self.averaging))

    @property
    def cadence(self) -> Cadence:
        beat = replace(self.averaging.cadence.beats[0], every=self.every, delay=self.delay, merge=self.merge)
        return Cadence((beat,), self.lag)

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        self.averaging.check(world, nodes)
        refuse_two(self.outlier, world)

    def attach(self, parameters: Sequence[Tensor], momentum: float) -> Algorithm:
        return replace(self, averaging=self.averaging.attach(parameters, momentum))

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        averaging = self.averaging.route(name, tensor)
        if not is_buffer(part_of(name)[0]):
            return replace(self, averaging=averaging)
        if outer.gossips(averaging):
            return outer.AtTimes(averaging=averaging, times=self.cadence)
        return DiLoCo(**{name: getattr(self, name) for name in outer.OF_BUFFERS}, rate=1.0, momentum=0.0)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return outer.alone(bucket, state)
        ctx = replace(ctx, step=ctx.step // self.every)
        weights, known, gossips = wide(bucket.flat), outer.start_of(bucket, state), outer.gossips(self.averaging)
        if known is None and not gossips:
            return (yield from outer.begin_at_mean(bucket, weights, state, ctx, self.outlier))
        start, learned = outer.learned_from(known, weights, state)
        if not gossips:
            learned = yield from in_line(learned, bucket, state, ctx, self.outlier)
            start, learned = yield from outer.average_with_all(self.averaging, bucket, start, learned, state, ctx)
        outer.step(start, learned, bucket, state, self.rate, self.momentum, self.nesterov)
        if gossips:
            yield from outer.average_with_peers(self.averaging, bucket, state, ctx)
        return outer.landed(weights, bucket, state, unknown=known is None)

    def begin(self, bucket: Bucket, state: State, ctx: Context) -> None:
        if ctx.world > 1:
            outer.begin_at(wide(bucket.flat).clone(), bucket, state)
