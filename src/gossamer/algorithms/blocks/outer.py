"""Outer: one step of an outer optimizer, from the weights at which workers began to where they begin again."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, finishes, parts_of
from gossamer.algorithms.blocks.difference import computed
from gossamer.algorithms.blocks.mean import mean_of
from gossamer.algorithms.blocks.shares import check_outlier, in_line
from gossamer.algorithms.cadence import Cadence
from gossamer.buckets import Bucket
from gossamer.checks import is_number
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.state import BEGUN, MOMENTUM, OUTER_WEIGHTS, State

START, VELOCITY, AVERAGING, PEERS = OUTER_WEIGHTS, f"outer {MOMENTUM}", "averaging ", "peers "

OF_BUFFERS = ("every", "delay", "merge", "lag", "outlier", "bucket_bytes")
"""The fields that hold for buffers as well, which become their mean at the times of the weights."""

GROWING = 5

_GROWTH = "growth"
"""The extra of a bucket: how many outer steps were twice as long as all before and longer than the weights, and the longest."""


@dataclass(frozen=True, kw_only=True)
class AtTimes(Algorithm, register=False):
    """``averaging`` with peers at the ``times`` of outer steps: for buffers, of which the average alone is wanted."""

    averaging: Algorithm
    times: Cadence

    @property
    def cadence(self) -> Cadence:
        return self.times

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        return self.averaging.exchange(bucket, state, replace(ctx, step=ctx.step // self.times.beats[0].every))


def begin_at(start: Tensor, bucket: Bucket, state: State) -> None:
    """The outer optimizer begins at these weights."""
    state[START] = start
    for segment in bucket.segments:
        state.set_extra(BEGUN, torch.ones((), device=start.device), segment.name)


def start_of(bucket: Bucket, state: State) -> Tensor | None:
    """The weights at which the worker began; None where those of any parameter are not known."""
    if any(state.extra(BEGUN, segment.name) is None for segment in bucket.segments):
        return None
    return state.get(START)


def begin_at_mean(bucket: Bucket, weights: Tensor, state: State, ctx: Context, outlier: float | None = None) -> Flow[Tensor]:
    """Where the weights at which workers began are not known: what brings them to their mean, where the outer optimizer
    begins. ``outlier``: as for deltas, of the weights themselves."""
    if outlier is None:
        mean = yield from mean_of(bucket, weights, ctx)
    else:
        own = yield from in_line(weights.clone(), bucket, state, ctx, outlier)
        mean = yield from mean_of(bucket, own, replace(ctx, samples=None))
    if mean.device.type == "meta" or mean.isfinite().all():  # the same on all workers
        begin_at(mean, bucket, state)
        state[VELOCITY] = torch.zeros_like(mean)
    return torch.sub(mean, weights, out=weights).to(bucket.flat.dtype)


def alone(bucket: Bucket, state: State, *more: str) -> Tensor:
    """In place of an exchange of one worker: it takes no outer steps, and forgets from where it would (and ``more``), so that
    it begins anew when there are others again."""
    for name in (START, VELOCITY, *more):
        state.scoped(name).forget()
    return bucket.flat.zero_()


def gossips(averaging: Algorithm) -> bool:
    """Whether workers have outer weights of their own, which they average with their peers'."""
    return averaging.subject == "weights"


def learned_from(known: Tensor | None, weights: Tensor, state: State) -> tuple[Tensor, Tensor]:
    """The weights at which a worker began, and its Δ. Where it does not know them, 0: its peers do not know that, and expect as
    much as ever."""
    start = weights.clone() if known is None else known
    return start, torch.sub(start, weights, out=state.fresh(VELOCITY, start))


def average_with_all(
    averaging: Algorithm, bucket: Bucket, start: Tensor, delta: Tensor, state: State, ctx: Context
) -> Flow[tuple[Tensor, Tensor]]:
    """The outer weights before an outer step, in the first exchange of all workers, which began at the same weights, the mean
    of all; and the mean of what all have learned. ``averaging`` is over gradients."""
    if VELOCITY not in state:
        start = yield from mean_of(bucket, start, ctx)
    mean = yield from averaging.exchange(bucket.holding(delta), state.scoped(AVERAGING), ctx)
    return start, mean


def average_with_peers(averaging: Algorithm, bucket: Bucket, state: State, ctx: Context) -> Flow[None]:
    """The outer weights and the velocity after an outer step of this worker's own become averages with its peers': so the mean
    of all takes the mean step, with any topology. ``averaging`` is over weights.

    Averages of x and Δ before the step (NoLoCo) are as many bytes, but there each velocity goes on with what pairs differed by
    for ten periods: a GPT of 3.2 million parameters on 8 workers ends 0.023 nats behind DiLoCo instead of 0.018.
    """
    for name, own in ((START, PEERS), (VELOCITY, AVERAGING)):
        values = state[name]
        difference = yield from averaging.exchange(bucket.holding(values.clone()), state.scoped(own), ctx)  # may write to it
        state[name] = values + computed(difference, values.dtype)


def landed(weights: Tensor, bucket: Bucket, state: State, unknown: bool = False) -> Tensor:
    """What leads from ``weights``, which are given away, to the outer weights after a step, of which nothing is kept where they
    are not finite. ``unknown``: the worker did not know where it began, and does from here on."""
    after = state[START]
    broken = ~(torch.linalg.vector_norm(after) + torch.linalg.vector_norm(state[VELOCITY])).isfinite()
    if unknown and (broken.device.type == "meta" or not broken):
        begin_at(after, bucket, state)
    torch.sub(after, weights, out=weights)
    state.keep_where(broken)
    return weights.to(bucket.flat.dtype)


def step(start: Tensor, gradient: Tensor, bucket: Bucket, state: State, rate: float, momentum: float, nesterov: bool) -> None:
    """v ← momentum·v + g; x ← x - rate·(g + momentum·v), or x - rate·v: both are kept. ``gradient`` is given away."""
    before, after = state[VELOCITY], state.fresh(START, start)
    if nesterov:
        torch.sub(start, gradient, alpha=rate, out=after)
    else:
        after.copy_(start)
    velocity = gradient.add_(before, alpha=momentum)  # in its place: it is ours
    after.sub_(velocity, alpha=rate * (momentum if nesterov else 1))
    state[START], state[VELOCITY] = after, velocity
    refuse_divergence(start, after, bucket, state, f"rate={rate}, momentum={momentum}")


def refuse_divergence(start: Tensor, after: Tensor, bucket: Bucket, state: State, fields: str) -> None:
    """Raise ConfigurationError after ``GROWING`` outer steps that were each more than twice as long as all before, and longer
    than the weights that they began at.

    No healthy training makes so many: weights that begin at zero are longer than a step after two or three, also where the
    learning rate grows linearly; and those that stay near zero have steps as long as they are, of which noise makes a longer
    one now and then, but none a multiple of all. On a device the host waits here, once in a period.
    """
    if start.device.type == "meta":
        return
    length, had = torch.dist(after, start), state.extra(_GROWTH)
    count, most = (length * 0, length * 0) if had is None else had.to(length).unbind()
    grows = (length > 2 * most) & (length > torch.linalg.vector_norm(start))
    growth = torch.stack([count + grows, torch.fmax(most, length)])
    state.set_extra(_GROWTH, growth)
    if growth[0] >= GROWING:
        raise ConfigurationError(
            f"the outer optimizer diverges with {fields}: {GROWING} outer steps from {bucket.layout.names[0]} on were each "
            "more than twice as long as all before, and longer than the weights; take a smaller rate, or a smaller inner "
            "learning rate"
        )


def check_optimizer(rate: float, momentum: float, nesterov: bool) -> None:
    """Raise ConfigurationError unless an outer optimizer can have them."""
    if not is_number(rate) or not 0 < rate < math.inf:
        raise ConfigurationError(f"rate, of the outer optimizer, must be a number above 0, and finite; got {rate!r}")
    if not is_number(momentum) or not 0 <= momentum < 1:
        raise ConfigurationError(f"momentum, of the outer optimizer, must be from 0 to below 1; got {momentum!r}")
    if not isinstance(nesterov, bool):
        raise ConfigurationError(f"nesterov, of the outer optimizer, must be True or False; got {nesterov!r}")


def check_averaging(averaging: object, outlier: object = None) -> None:
    """Raise ConfigurationError unless it averages one tensor by itself, whenever it is asked to, and (``outlier``) without the
    workers that are out of line."""
    if not isinstance(averaging, Algorithm):
        raise ConfigurationError(f"averaging must be an instance of a gossamer algorithm; got {averaging!r}")
    traits, cadence = averaging.traits, averaging.cadence
    if parts_of(averaging) or finishes(averaging) or traits.takes_momentum:
        raise ConfigurationError(
            f"averaging takes an algorithm that averages one bucket by itself, such as ScatterReduce(); {averaging!r} does not"
        )
    if averaging.subject == "weights" and (traits.weighted or traits.moves_mean or traits.history):
        raise ConfigurationError(
            f"averaging takes an algorithm that keeps the mean of what it exchanges, such as Gossip(); {averaging!r} does not"
        )
    own = any(beat.every > 1 or beat.delay != 1 or beat.merge is not None for beat in cadence.beats)
    if cadence.lag or cadence.late or cadence.most_ahead or own:
        raise ConfigurationError(
            f"averaging is asked for in every outer step, and its result is used in that: {averaging!r} has an every=, delay=, "
            "merge=, lag=, late= or ahead= of its own; leave it out"
        )
    check_outlier(outlier)
    if outlier is not None and gossips(averaging):
        raise ConfigurationError("outlier is for an averaging over all workers: peers do not know what is in line among all")
