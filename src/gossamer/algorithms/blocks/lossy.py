"""Lossy: what relaxations that lose something have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket
from gossamer.codecs.base import Codec
from gossamer.codecs.contraction import check_contracts, check_hashable
from gossamer.codecs.error_feedback import ErrorFeedback, faded
from gossamer.codecs.wire import Wire, narrowed
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State


@dataclass(frozen=True, kw_only=True)
class Lossy(Algorithm, register=False):
    """Base of relaxations of the gradient's exchange.

    ``exact_vectors``: parameters of fewer than two dimensions (biases, the scales of norms) are all-reduced exactly,
    in buckets of their own: they are a thousandth of the bytes and hurt most when they are wrong.
    """

    exact_vectors: bool = True

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        return self.exactly if self.exact_vectors and tensor.ndim < 2 else self

    @property
    def exactly(self) -> Algorithm:
        """What averages exactly in its place."""
        return AllReduce(bucket_bytes=self.bucket_bytes)

    def among_one(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        """The exchange where there is nobody to talk to: the gradient and the residual, of which nothing is kept back."""
        gradient: Tensor = yield from self.exactly.exchange(bucket, state, ctx)
        unsent = state.get(RESIDUAL)
        if unsent is None:
            return gradient
        whole = self.hand_over(gradient, state, ctx)
        state[RESIDUAL] = torch.zeros_like(unsent)  # and not nothing: part of it may be put back
        return whole.to(gradient.dtype)


def with_unsent(flat: Tensor, state: State, decay: float) -> Tensor:
    """``flat`` and the residual as it is sent next, times ``decay``: what an error feedback that fades hands over."""
    unsent = faded(state.get(RESIDUAL), decay)
    return flat if unsent is None else wide(flat) + unsent


def check_codec(codec: object, *, remembers: bool = True) -> None:
    """Raise ConfigurationError unless it is a codec that leaves what it loses to the algorithm; and loses less than there
    was, where the algorithm ``remembers`` what was lost and sends it later."""
    if not isinstance(codec, Codec):
        raise ConfigurationError(f"codec must be a codec, such as Quantize(bits=8); got {codec!r}")
    if isinstance(codec, ErrorFeedback):
        raise ConfigurationError("give the codec alone: the algorithm itself remembers what is lost (see its fields)")
    check_hashable(codec)
    if remembers:
        check_contracts(codec)


def turn_over(bucket: Bucket, flat: Tensor, state: State, residual: Wire) -> tuple[Tensor, Tensor]:
    """Memory for what remains of ``flat``, and for the result of the exchange; one of them is that of ``flat``.

    ``flat``: :func:`wide` of the bucket's. A remainder that is kept in fewer bits has memory of its own, and the result may be
    written over ``flat`` when that is read no more. One that is kept as it is takes the place of ``flat``, and the result goes
    to where the residual before the last one was.
    """
    kept = narrowed(flat.dtype, residual)
    if kept != flat.dtype:
        return state.fresh(RESIDUAL, flat, kept), flat
    return bucket.give() if flat is bucket.flat else flat, state.fresh(RESIDUAL, flat)


Memories = Sequence[tuple[Tensor, Tensor]]
"""What is to be remembered, each with what was remembered before."""


def leave_out(norms: Tensor, memories: Memories) -> Tensor:
    """Write over what is not finite in ``memories`` what was there before; ``norms`` tell, on a host, if anything is not.

    For memories that nobody forgets as a whole because of it: replicas of weights; and chunks that a worker keeps to itself. Of
    these no result tells the others, so this worker alone would forget the step, and what it has decided together with them.
    Returns ``norms``.
    """
    if norms.device.type == "meta" or (norms.device.type == "cpu" and norms.isfinite().all()):
        return norms
    for now, before in memories:
        torch.where(now.isfinite(), now, before.to(now.dtype), out=now)
    return norms


def bounded(norms: Tensor) -> Tensor:
    """``norms``, in place, with the largest number for NaN and inf: those chunks are the next ones to be sent."""
    largest = torch.finfo(norms.dtype).max
    return norms.nan_to_num_(nan=largest, posinf=largest)
