"""DiLoCo: every worker trains alone for many steps, and an outer optimizer takes what all have learned as its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.blocks.outer import (
    AVERAGING,
    PEERS,
    VELOCITY,
    averaged,
    begin_at,
    check_averaging,
    outer_step,
    start_of,
)
from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.local_sgd import LocalSGD, mean_of
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket, is_buffer
from gossamer.checks import is_number
from gossamer.comm.ops import Flow, Group
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.pieces import part_of
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """All workers begin at the same weights x, and train alone for ``every`` steps. How far each has come, Δ = x - w, the outer
    delta, is averaged over them, and is the gradient of one step of SGD, from x to where all begin again:
    ``v ← momentum·v + Δ``, ``x ← x - rate·(Δ + momentum·v)``, or ``x ← x - rate·v`` without ``nesterov``.

    ``rate`` 1 and ``momentum`` 0 are :class:`LocalSGD`; ``DiLoCo(rate=1.0, momentum=0.5, nesterov=False)`` is SlowMo, for an
    inner rate that stays as it is. The first x is what the weights are before the first step. Where another algorithm came
    before (:func:`after`), or a loaded state does not know x, the first exchange is an average only, and the mean is x. When
    the new weights are there, ``delay`` and ``merge`` say as in :class:`LocalSGD`, and ``dense`` how long gradients are
    averaged before. Inner optimizers keep what they remember.

    ``averaging``: an algorithm over gradients that needs no step of its own. ``ScatterReduce(codec=Quantize(bits=4))`` sends
    an eighth of the bytes, and what it loses one exchange later. What it averages exactly (biases, scales) it averages
    exactly here. Or one over weights: ``averaging=Gossip()`` is gossip with an outer optimizer, without any collective. Each
    worker has an x and a v of its own; x and Δ become their averages with its peers' before each outer step, and every outer
    step of the topology is one step. The mean of all x moves by the mean outer step; among peers that are all workers
    (``topology=Complete()``) it is DiLoCo. Buffers (``buffers="average"``) become their mean, or average with the peers'.

    Per exchange the messages and bytes of ``averaging``, with gossip twice those. Memory: x and v, each as before an
    exchange and as after it, in full precision, and what ``averaging`` remembers.

    Unlike every other exchange of weights this one moves their mean. Not the choice for a few steps alone: an outer momentum
    of 0.9 carries on what few steps have learned.

    Source: Douillard et al. 2023 (arXiv 2311.08105); Wang et al. 2019 (arXiv 1910.00643), SlowMo; Kolehmainen et al. 2025
    (arXiv 2506.10911), NoLoCo, whose gossip has the difference of the x within v.
    """

    every: int = 32
    rate: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True
    averaging: Algorithm = field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.rate) or not self.rate > 0:
            raise ConfigurationError(f"rate, of the outer optimizer, must be a number above 0; got {self.rate!r}")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ConfigurationError(f"momentum, of the outer optimizer, must be from 0 to below 1; got {self.momentum!r}")
        check_averaging(self.averaging)

    def _fields(self) -> dict[str, Algorithm]:
        return {}  # it averages by another, and is not made of it: that one moves gradients

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", moves_mean=True, dense=self.dense_steps)

    @property
    def cadence(self) -> Cadence:
        beat = self.averaging.cadence.beats[0]
        same = replace(beat, every=self.every, delay=self.delay, merge=self.merge)
        return Cadence((same,))

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        self.averaging.check(world, nodes)

    def attach(self, parameters: Sequence[Tensor], momentum: float) -> Algorithm:
        return replace(self, averaging=self.averaging.attach(parameters, momentum))

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        if self._gossips and is_buffer(part_of(name)[0]):
            return replace(self.averaging.route(name, tensor), every=self.every)  # type: ignore[call-arg]
        if is_buffer(part_of(name)[0]):
            return LocalSGD(every=self.every, delay=self.delay, merge=self.merge, bucket_bytes=self.bucket_bytes)
        return replace(self, averaging=self.averaging.route(name, tensor))

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return bucket.flat.zero_()
        ctx = replace(ctx, step=ctx.step // self.every)
        weights, known = wide(bucket.flat), start_of(bucket, state)
        if known is None and not self._gossips:
            return (yield from self._average(bucket, weights, state, ctx))
        start = weights.clone() if known is None else known  # peers do not know what this worker knows: as many messages
        learned = torch.sub(start, weights, out=state.fresh(VELOCITY, start))
        if self._gossips or VELOCITY not in state:
            start = yield from self._together(bucket, start, state, ctx)
        gradient = yield from averaged(self.averaging, bucket, learned, state.scoped(AVERAGING), ctx)
        broken = ~(torch.linalg.vector_norm(gradient) + torch.linalg.vector_norm(start)).isfinite()
        after = outer_step(start, gradient, state, self.rate, self.momentum, self.nesterov)
        if known is None and (broken.device.type == "meta" or not broken):
            begin_at(after, bucket, state)
        delta = torch.sub(after, weights, out=weights)
        state.keep_where(broken)
        return delta.to(bucket.flat.dtype)

    @property
    def _gossips(self) -> bool:
        """Whether workers have outer weights of their own."""
        return self.averaging.subject == "weights"

    def _together(self, bucket: Bucket, start: Tensor, state: State, ctx: Context) -> Flow[Tensor]:
        """The outer weights of a worker and its peers: the mean of them; of all workers, once, where these have the same."""
        if self._gossips:
            return (yield from averaged(self.averaging, bucket, start, state.scoped(PEERS), ctx))
        return (yield from mean_of(bucket, start, ctx))

    def begin(self, bucket: Bucket, state: State, ctx: Context) -> None:
        if ctx.world > 1:
            begin_at(wide(bucket.flat).clone(), bucket, state)

    def _average(self, bucket: Bucket, weights: Tensor, state: State, ctx: Context) -> Flow[Tensor]:
        """Where x is not known: the mean of all, at which the outer optimizer begins."""
        mean = yield from mean_of(bucket, weights, ctx)
        if mean.device.type == "meta" or mean.isfinite().all():  # the same on all workers
            begin_at(mean, bucket, state)
            state[VELOCITY] = torch.zeros_like(mean)
        return torch.sub(mean, weights, out=weights).to(bucket.flat.dtype)
