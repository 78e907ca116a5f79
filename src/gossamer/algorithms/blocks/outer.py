"""Outer: one step of an outer optimizer, from the weights at which workers began to where they begin again."""

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, finishes, parts_of
from gossamer.algorithms.blocks.difference import computed
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.state import State

START, VELOCITY, AVERAGING, PEERS = "start", "velocity", "averaging ", "peers "

_BEGUN = "begun"
"""The extra of each parameter whose start is known: one that a loaded state did not know has none."""


def begin_at(start: Tensor, bucket: Bucket, state: State) -> None:
    """The outer optimizer begins at these weights."""
    state[START] = start
    for segment in bucket.segments:
        state.set_extra(_BEGUN, torch.ones((), device=start.device), segment.name)


def start_of(bucket: Bucket, state: State) -> Tensor | None:
    """The weights at which the worker began; None where those of any parameter are not known."""
    if any(state.extra(_BEGUN, segment.name) is None for segment in bucket.segments):
        return None
    return state.get(START)


def averaged(averaging: Algorithm, bucket: Bucket, values: Tensor, state: State, ctx: Context) -> Flow[Tensor]:
    """``values``, flat and like the bucket's, averaged by an algorithm over gradients, or over weights with its peers."""
    if averaging.subject == "gradients":
        mean: Tensor = yield from averaging.exchange(bucket.holding(values), state, ctx)
        return mean
    difference = yield from averaging.exchange(bucket.holding(values.clone()), state, ctx)  # which may write to it
    return values + computed(difference, values.dtype)


def outer_step(start: Tensor, gradient: Tensor, state: State, rate: float, momentum: float, nesterov: bool) -> Tensor:
    """v ← momentum·v + g; x ← x - rate·(g + momentum·v), or x - rate·v: the new x, which is kept as v is.

    ``gradient`` is given away. What is not finite is in the result; remembered, here or by what averages, it would stay.
    """
    before, after = state[VELOCITY], state.fresh(START, start)
    if nesterov:
        torch.sub(start, gradient, alpha=rate, out=after)
    else:
        after.copy_(start)
    velocity = gradient.add_(before, alpha=momentum)  # in its place: it is ours
    after.sub_(velocity, alpha=rate * (momentum if nesterov else 1))
    state[START], state[VELOCITY] = after, velocity
    return after


def check_averaging(averaging: object) -> None:
    """Raise ConfigurationError unless it averages one tensor by itself, whenever it is asked to."""
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
    if cadence.lag or cadence.late or cadence.most_ahead or any(beat.every > 1 for beat in cadence.beats):
        raise ConfigurationError(
            f"averaging is asked for in every outer step, and its result is used in that: {averaging!r} has an every=, lag=, "
            "late= or ahead= of its own; leave it out"
        )
