"""Gossip: average the weights with one partner per step."""

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket
from gossamer.codecs.cast import Wire, wire_codec
from gossamer.comm import topology
from gossamer.comm.ops import Flow, permute
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
        codec = wire_codec(self.wire)
        partners = topology.dissemination(ctx.step, ctx.world)
        message = codec.encode(bucket.flat)
        theirs = yield from permute(message, partners)
        numel, dtype = bucket.flat.numel(), bucket.flat.dtype
        # The message was only read by the exchange, so it still is what the partner received.
        return torch.sub(codec.decode(theirs, numel, dtype), codec.decode(message, numel, dtype)).mul_(0.5)
