"""Gossip: average the weights with one partner, or a few, per step."""

from dataclasses import dataclass, field
from typing import Any

import torch

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.difference import Difference
from gossamer.algorithms.blocks.meeting import Meeting, check_ahead
from gossamer.algorithms.cadence import Cadence, every
from gossamer.buckets import Bucket
from gossamer.codecs.wire import Wire, check_wire, narrow, narrowed
from gossamer.comm.ops import Flow, Permute, start, wait
from gossamer.comm.topology import Dissemination, Topology, exchange_at
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class Gossip(Meeting):
    """Each worker moves towards the weights of its peers: with ``topology=Dissemination()`` half-way towards one partner,
    another one in every step.

    Between two updates the weights travel while forward and backward go on; the average is applied just before the
    next local update, so that the learning rate keeps its meaning:
    ``w ← w + ½·(Q(w_partner) − Q(w))``. The worker's own *decoded* message is subtracted, not its weights: rounding
    then cancels in the mean over the workers, which moves by the full mean update however coarse the wire is. Of k
    partners each has the weight 1/(k + 1).

    ``topology``: who exchanges with whom (:mod:`gossamer.comm.topology`); ``rotated(…)`` changes the partners of every cycle.
    ``every``: steps between two exchanges. ``lag``: asynchronous; an exchange may take so many steps longer before a worker
    waits for it, so that a slow worker or a slow link delays the others only then. The result is a difference of messages,
    which keeps the mean of the workers however late it is added.

    Per exchange one message of the weights' size per partner (half with a 16-bit ``wire``), whatever the number of workers.
    Memory: the message, and one for each partner, of the wire's width.

    ``ahead``: a message is averaged one update after it was made. With momentum that update is much like the one before, so
    it can be foreseen: what is sent is ``w + ahead·(w − w before the last update)``. Replicas stay closer, as if they were
    averaged just *after* each update and everyone had waited for that; the mean over the workers moves as before. Measured
    with Adam: 1 saves 4 workers a few steps in a hundred, and 16 none. Without momentum an update does not
    tell of the next one: leave it at 0. After the last exchange of a run no update follows, and what was foreseen stays
    between the replicas: end with ``close(average=True)``. Costs no byte on the wire, and a copy of the weights. At
    most 2: what is too far ahead swings. Not with ``lag``.

    ``wire="fp16"`` is eight times as precise as ``"bf16"``; a value beyond ±65504 (a running variance) is sent as that, so
    that it stays each worker's own: take ``"bf16"`` where there are such.

    Not the choice when replicas must be bit-identical, or when fewer bytes (not fewer messages) are what is needed:
    uncompressed, it moves about what a ring all-reduce moves. With Adam, where each worker's batch is small, take
    :class:`gossamer.optim.GossipAdamW`: AdamW divides by the size of a gradient that is mostly noise, before any average.
    A small GPT with 16 workers is 0.34 nats behind all-reduce after 400 steps, 0.11 with ours, and 0 where
    :class:`Hierarchical` averages four workers' gradients first. With SGD nothing is lost.

    Source: Daily et al. 2018 (arXiv 1803.05880); the mean-preserving form is ours. Weights predicted from the last update:
    Chen et al. 2018 (arXiv 1809.02839), SpecTrain, against staleness in pipelines.
    """

    wire: Wire = "bf16"
    topology: Topology = field(default_factory=Dissemination)
    every: int = 1
    lag: int = 0
    ahead: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("wire", self.wire)
        check_ahead(self.ahead, self.lag)

    @property
    def cadence(self) -> Cadence:
        return every(self.every, lag=self.lag, topology=self.topology, ahead=self.ahead)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return narrowed(dtype, self.wire)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        partners = exchange_at(self.topology, ctx.step // self.every, ctx.world).permutations
        message, dtype = bucket.flat, bucket.layout.dtype
        if message.element_size() > 2 and (self.wire != "fp32" or message.dtype != dtype):  # another method has packed it
            message = narrow(bucket.scratch("message", narrowed(dtype, self.wire)), message)
        handles = []
        for number, permutation in enumerate(partners):
            place = bucket.scratch(f"received {number}", message.dtype)
            handles.append((yield start(Permute(message, permutation, place))))
        theirs = []
        for handle in handles:
            theirs.append((yield wait(handle)))
        return Difference(message, theirs, 1 / (len(theirs) + 1))
