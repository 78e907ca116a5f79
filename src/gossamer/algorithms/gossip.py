"""Gossip: average the weights with one partner per step."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket
from gossamer.codecs.cast import Wire, wire_codec
from gossamer.comm import topology
from gossamer.comm.ops import Flow, Permute, start, wait
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class Gossip(Algorithm):
    """Each worker moves half-way towards the weights of one partner, which changes every step (dissemination).

    Between two updates the weights travel while forward and backward go on; the average is applied just before the
    next local update, so that the learning rate keeps its meaning:
    ``w ← w + ½·(Q(w_partner) − Q(w))``. The worker's own *decoded* message is subtracted, not its weights: rounding
    then cancels in the mean over the workers, which moves by the full mean update however coarse the wire is.

    Per step one message of the weights' size (half with a 16-bit ``wire``), whatever the number of workers.

    Not the choice when replicas must be bit-identical, or when fewer bytes (not fewer messages) are what is needed:
    uncompressed, it moves about what a ring all-reduce moves.

    Source: Daily et al. 2018 (arXiv 1803.05880); the mean-preserving form is ours.
    """

    subject: ClassVar[Literal["gradients", "weights"]] = "weights"

    wire: Wire = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        wire_codec(self.wire)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        partners = topology.dissemination(ctx.step, ctx.world)
        dtype = wire_codec(self.wire).wire_dtype(bucket.flat.dtype)
        delta, rows = bucket.fresh(), []
        buffers = (bucket.scratch("sent", dtype), bucket.scratch("received", dtype))
        size = max(1, PIECE_BYTES // dtype.itemsize)
        for weights, sent, received, result in zip(*(t.split(size) for t in (bucket.flat, *buffers, delta)), strict=True):
            handle = yield start(Permute(sent.copy_(weights), partners, received))
            rows.append((handle, sent, result))
        for handle, sent, result in rows:
            # What was sent was only read, so it still is what the partner received.
            half_difference((yield wait(handle)), sent, result)
        return delta


PIECE_BYTES = 2**20
"""A longer message travels in pieces: one is rounded or averaged while others are on the wire."""

_PIECE = 2**16
"""Elements that are converted at a time: they and their copies stay in a processor's cache."""


def half_difference(theirs: Tensor, mine: Tensor, out: Tensor) -> Tensor:
    """½·(theirs − mine), computed in the type of ``out``."""
    for a, b, result in zip(theirs.split(_PIECE), mine.split(_PIECE), out.split(_PIECE), strict=True):
        torch.sub(a.to(out.dtype), b.to(out.dtype), out=result).mul_(0.5)
    return out
