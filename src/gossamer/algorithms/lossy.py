"""Lossy: what relaxations that lose something have in common."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm
from gossamer.buckets import Bucket
from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Wire, wire_codec
from gossamer.codecs.contraction import contraction
from gossamer.codecs.error_feedback import ErrorFeedback
from gossamer.errors import ConfigurationError
from gossamer.memory import portions
from gossamer.state import RESIDUAL, State

EXACT = "exact"


@dataclass(frozen=True, kw_only=True)
class Lossy(Algorithm, register=False):
    """Base of relaxations of the gradient's exchange.

    ``exact_vectors``: parameters of fewer than two dimensions (biases, the scales of norms) are all-reduced exactly,
    in buckets of their own: they are a thousandth of the bytes and hurt most when they are wrong.
    """

    exact_vectors: bool = True

    def route(self, name: str, tensor: Tensor) -> str:
        return EXACT if self.exact_vectors and tensor.ndim < 2 else ""

    def of(self, label: str) -> Algorithm:
        return AllReduce(bucket_bytes=self.bucket_bytes) if label == EXACT else self


def check_codec(codec: object, *, remembers: bool = True) -> None:
    """Raise ConfigurationError unless it is a codec that leaves what it loses to the algorithm; and loses less than there
    was, where the algorithm ``remembers`` what was lost and sends it later."""
    if not isinstance(codec, Codec):
        raise ConfigurationError(f"codec must be a codec, such as Quantize(bits=8); got {codec!r}")
    if isinstance(codec, ErrorFeedback):
        raise ConfigurationError("give the codec alone: the algorithm itself remembers what is lost (see its fields)")
    if remembers and codec.unbiased and contraction(codec) <= 0:  # biased ones round to what is near
        raise ConfigurationError(
            f"{codec!r} makes what it encodes longer, so that what is remembered of it would grow from step to step: take one "
            "that does not (RandomK with unbiased=False, Quantize with more bits), or an algorithm without error feedback"
        )


def stays_as_it_is(rest: Tensor, residual: Wire) -> bool:
    """Whether a remainder has the type already in which it is kept."""
    return wire_codec(residual).wire_dtype(rest.dtype) == rest.dtype


def keep_back(state: State, rest: Tensor, residual: Wire) -> None:
    """Remember ``rest`` as what is owed, in the type in which that is kept: itself, if it is that already.

    What is too large for that type is kept as the largest that it has: one worker alone must not come to inf, for which all
    would have to forget this step.
    """
    if stays_as_it_is(rest, residual):
        state[RESIDUAL] = rest
        return
    dtype = wire_codec(residual).wire_dtype(rest.dtype)
    state[RESIDUAL] = narrow = state.fresh(RESIDUAL, rest, dtype)
    largest = torch.finfo(dtype).max
    for part, out in portions(rest, narrow):
        out.copy_(part.clamp(-largest, largest) + 0 * part)  # what is not finite comes out as NaN


def turn_over(bucket: Bucket, flat: Tensor, state: State, residual: Wire) -> tuple[Tensor, Tensor]:
    """Memory for what remains of ``flat`` (its own: to be written in place), and for the result of the exchange.

    ``flat``: :func:`wide` of the bucket's. Where the remainder is kept as it is, the bucket's memory becomes the residual's,
    and the result goes to where the residual before the last one was. Where it is kept in a narrower ``residual``, both are
    the same memory: the result may be written when :func:`keep_back` has copied the remainder.
    """
    if not stays_as_it_is(flat, residual):
        return flat, flat
    return bucket.give() if flat is bucket.flat else flat, state.fresh(RESIDUAL, flat)


Memories = Sequence[tuple[Tensor, Tensor]]
"""What is to be remembered, each with what was remembered before."""


def leave_out(norms: Tensor, memories: Memories) -> Tensor:
    """Write over what is not finite in ``memories`` what was there before; ``norms`` tell, on a host, if anything is not.

    For what a worker keeps to itself, and no result tells the others. If it were remembered, this worker would forget the
    step, and with it what it has decided together with the others, who would not. Returns ``norms``.
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
