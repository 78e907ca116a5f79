"""DiLoCo: every worker trains alone for many steps, and an outer optimizer takes what all have learned as its gradient."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context, finishes, parts_of
from gossamer.algorithms.local_sgd import LocalSGD, mean_of
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket, is_buffer
from gossamer.checks import is_number
from gossamer.comm.ops import Flow, Group
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.pieces import part_of
from gossamer.state import State

START, VELOCITY, AVERAGING = "start", "velocity", "averaging "

_BEGUN = "begun"
"""The extra of each parameter whose x is known: one that a loaded state did not know has none."""


@dataclass(frozen=True, kw_only=True)
class DiLoCo(LocalSGD):
    """All workers begin at the same weights x, and train alone for ``every`` steps. How far each has come, Δ = x − w, the outer
    delta, is averaged over them, and is the gradient of one step of SGD, from x to where all begin again:
    ``v ← momentum·v + Δ``, ``x ← x − rate·(Δ + momentum·v)``, or ``x ← x − rate·v`` without ``nesterov``.

    ``rate`` 1 and ``momentum`` 0 are :class:`LocalSGD`; ``DiLoCo(rate=1.0, momentum=0.5, nesterov=False)`` is SlowMo, for an
    inner rate that stays as it is. The first x is what the weights are before the first step: the first exchange averages
    them too, since nothing else makes sure that all begin at the same. Where another algorithm came before (:func:`after`),
    or a loaded state does not know x, the first exchange is an average only, and the mean is x. As
    everywhere, the new weights are there just before the update after the next backward pass, which hides the exchange;
    ``delay=0`` waits for them in the same step, as the papers do. Inner optimizers keep what they remember.

    ``averaging``: any algorithm over gradients that needs no step of its own. ``ScatterReduce(codec=Quantize(bits=4))`` sends
    an eighth of the bytes, and what it loses one exchange later. Biases, scales and whatever else it averages exactly it
    averages exactly here (with ``PowerSGD`` inside :func:`in_parts` also what is cut of a matrix). Buffers
    (``buffers="average"``) become their mean.

    Per exchange the messages and bytes of ``averaging``; per step 1/``every`` of that. Memory: x and v, each as before an
    exchange and as after it, in full precision, and what ``averaging`` remembers.

    Unlike every other exchange of weights this one moves their mean. Not the choice for short runs with Adam, nor for a few
    steps alone with it: an outer momentum of 0.9 then throws it back (a GPT after 400 steps, 8 workers: 0.8 nats behind an
    all-reduce with ``every=8``, 0.5 with 32, 0.25 with :class:`LocalSGD`). With SGD it is like a higher rate.

    Source: Douillard et al. 2023 (arXiv 2311.08105); Wang et al. 2019 (arXiv 1910.00643), SlowMo.
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
        _check(self.averaging)

    def _fields(self) -> dict[str, Algorithm]:
        return {}  # it averages by another, and is not made of it: that one moves gradients

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", moves_mean=True)

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        self.averaging.check(world, nodes)

    def attach(self, parameters: Sequence[Tensor], momentum: float) -> Algorithm:
        return replace(self, averaging=self.averaging.attach(parameters, momentum))

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        if is_buffer(part_of(name)[0]):
            return LocalSGD(every=self.every, delay=self.delay, merge=self.merge, bucket_bytes=self.bucket_bytes)
        return replace(self, averaging=self.averaging.route(name, tensor))

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return bucket.flat.zero_()
        weights, start = wide(bucket.flat), state.get(START)
        if start is None or any(state.extra(_BEGUN, segment.name) is None for segment in bucket.segments):
            return (yield from self._mean(bucket, weights, state, ctx))
        if VELOCITY not in state:
            start = yield from mean_of(bucket, start, ctx)
        learned = torch.sub(start, weights, out=state.fresh(VELOCITY, start))
        gradient = yield from self.averaging.exchange(bucket.holding(learned), state.scoped(AVERAGING), ctx)
        broken = ~torch.linalg.vector_norm(gradient).isfinite()  # on all workers, or on none
        before, after = state[VELOCITY], state.fresh(START, start)
        if self.nesterov:
            torch.sub(start, gradient, alpha=self.rate, out=after)
        else:
            after.copy_(start)
        velocity = gradient.add_(before, alpha=self.momentum)  # in its place: it is ours
        after.sub_(velocity, alpha=self.rate * (self.momentum if self.nesterov else 1))
        delta = torch.sub(after, weights, out=weights)
        state[START], state[VELOCITY] = after, velocity
        state.keep_where(broken)  # it is in the result; remembered, here or by what averages, it would stay for ever
        return delta.to(bucket.flat.dtype)

    def begin(self, bucket: Bucket, state: State, ctx: Context) -> None:
        if ctx.world > 1:
            _begin_at(wide(bucket.flat).clone(), bucket, state)

    def _mean(self, bucket: Bucket, weights: Tensor, state: State, ctx: Context) -> Flow[Tensor]:
        """Where x is not known: the mean of all, at which the outer optimizer begins."""
        mean = yield from mean_of(bucket, weights, ctx)
        if mean.device.type == "meta" or mean.isfinite().all():  # the same on all workers
            _begin_at(mean, bucket, state)
            state[VELOCITY] = torch.zeros_like(mean)
        return torch.sub(mean, weights, out=weights).to(bucket.flat.dtype)


def _begin_at(start: Tensor, bucket: Bucket, state: State) -> None:
    """The outer optimizer begins at these weights."""
    state[START] = start
    for segment in bucket.segments:
        state.set_extra(_BEGUN, torch.ones((), device=start.device), segment.name)


def _check(averaging: object) -> None:
    """Raise ConfigurationError unless it averages one tensor over all workers, by itself, whenever it is asked to."""
    if not isinstance(averaging, Algorithm):
        raise ConfigurationError(f"averaging must be an instance of a gossamer algorithm; got {averaging!r}")
    if averaging.subject != "gradients":
        raise ConfigurationError(f"averaging takes an algorithm over gradients; {averaging!r} moves weights")
    if parts_of(averaging) or finishes(averaging) or averaging.traits.takes_momentum:
        raise ConfigurationError(
            f"averaging takes an algorithm that averages one bucket by itself, such as ScatterReduce(); {averaging!r} does not"
        )
