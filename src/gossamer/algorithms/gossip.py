"""Gossip: average the weights with one partner, or a few, per step."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket
from gossamer.checks import is_whole
from gossamer.codecs.cast import Wire, check_wire, wire_codec
from gossamer.comm.mixing import check_connected
from gossamer.comm.ops import Flow, Permute, start, wait
from gossamer.comm.topology import Dissemination, Pattern, Topology
from gossamer.errors import ConfigurationError
from gossamer.memory import is_momentary, momentary, portions
from gossamer.state import State


class Meeting(Algorithm, register=False):
    """What algorithms over weights whose workers meet as a ``topology`` says, ``every`` so many steps, have in common.

    Not a dataclass: those below it declare the fields, each with its own defaults.
    """

    subject: ClassVar[Literal["gradients", "weights"]] = "weights"

    topology: Any
    every: int
    lag: int

    topologies: ClassVar[Any] = Topology
    """What a topology may be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.topology, self.topologies):
            directed = self.topologies is not Topology
            where = "gossamer.comm.topology or gossamer.comm.digraph" if directed else "gossamer.comm.topology"
            hint = "; directed ones go with PushSum" if isinstance(self.topology, Pattern) else ""
            raise ConfigurationError(f"topology must be one of {where}, such as Ring(); got {self.topology!r}{hint}")
        check_steps("every", self.every)
        check_steps("lag", self.lag, least=0)

    def check(self, world: int) -> None:
        try:
            check_connected(self.topology, world)
        except ValueError as error:
            raise ConfigurationError(f"{type(self).__name__}: {error}") from error

    def due(self, step: int) -> bool:
        return step % self.every == 0

    @property
    def traffic_period(self) -> int:
        return self.every

    @property
    def may_lag(self) -> int:
        return self.lag

    def step_of(self, exchange: int) -> int:
        return exchange * self.every


@dataclass(frozen=True, kw_only=True)
class Gossip(Meeting):
    """Each worker moves towards the weights of those that it meets: with ``topology=Dissemination()`` half-way towards one
    partner, which changes every step.

    Between two updates the weights travel while forward and backward go on; the average is applied just before the
    next local update, so that the learning rate keeps its meaning:
    ``w ← w + ½·(Q(w_partner) − Q(w))``. The worker's own *decoded* message is subtracted, not its weights: rounding
    then cancels in the mean over the workers, which moves by the full mean update however coarse the wire is. Of k
    partners each has the weight 1/(k + 1).

    ``topology``: who meets whom (:mod:`gossamer.comm.topology`); ``rotated(…)`` changes the partners of every cycle.
    ``every``: only after every so many steps. ``lag``: asynchronous; an exchange may take so many steps longer before anyone
    waits for it, so that a slow worker or a slow link holds nobody up at once. What it brings is a difference of what was
    sent, which keeps the mean of the workers however late it is added.

    Per exchange one message of the weights' size per partner (half with a 16-bit ``wire``), whatever the number of workers.
    Memory: one copy of the weights, in which messages of half the width and their answers are kept; in full width, and for
    each further partner, one message more.

    Not the choice when replicas must be bit-identical, or when fewer bytes (not fewer messages) are what is needed:
    uncompressed, it moves about what a ring all-reduce moves. With Adam, where each worker's batch is small, take
    :class:`gossamer.optim.GossipAdamW`: AdamW divides by the size of a gradient that is mostly noise, and then it is averaged
    (a small GPT with 16 workers, after 400 steps: 0.34 nats behind all-reduce, 0.13 with ours, and nothing where
    :class:`Hierarchical` averages four workers' gradients first; with SGD nothing is lost).

    Source: Daily et al. 2018 (arXiv 1803.05880); the mean-preserving form is ours.
    """

    wire: Wire = "bf16"
    topology: Topology = field(default_factory=Dissemination)
    every: int = 1
    lag: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("wire", self.wire)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        partners = self.topology.at(ctx.step // self.every, ctx.world).permutations
        delta, dtype = bucket.flat, wire_codec(self.wire).wire_dtype(bucket.flat.dtype)
        if not partners:
            return delta.zero_()
        # A message of half the width and its answer fit into the memory of the weights they are made of. A short one does not
        # go there: nothing has to be moved then out of the way of what is written over it.
        room, size = delta.element_size() // dtype.itemsize, max(1, PIECE_BYTES // dtype.itemsize)
        apart = room > 1 and is_momentary(delta.numel(), dtype, delta.device)
        places = [bucket.scratch(f"received {i}", dtype) for i in range(len(partners) + (not apart) - room)]
        pieces = bucket.views_of_flat(
            (dtype, size), lambda flat: [(piece, piece.view(dtype).tensor_split(room)) for piece in flat.split(size)]
        )
        sends = cut(momentary(delta.numel(), dtype, delta.device), size) if apart else [within[0] for _, within in pieces]
        rows = []
        for (piece, within), sent, *beside in zip(pieces, sends, *(cut(each, size) for each in places), strict=True):
            if apart:
                sent.copy_(piece)
            elif room > 1:
                sent.copy_(momentary(piece.numel(), dtype, piece.device).copy_(piece))  # which the message overwrites
            handles = []
            for permutation, place in zip(partners, [*reversed(within[not apart :]), *beside], strict=False):
                handles.append((yield start(Permute(sent, permutation, place))))
            rows.append((handles, sent, piece))
        for (first, *others), sent, piece in rows:
            share = 1 / (len(others) + 2)
            theirs = yield wait(first)
            # What was sent was only read, so it still is what the partner received.
            if others:
                result = torch.empty_like(piece)
                add_difference(theirs, sent, share, result, fresh=True)
                for handle in others:
                    add_difference((yield wait(handle)), sent, share, result, fresh=False)
                piece.copy_(result)
            else:
                # The answer lies at the end of the piece: from the front on, nothing is overwritten that is still to be read.
                mine = sent if apart or room == 1 else momentary(sent.numel(), dtype, sent.device).copy_(sent)
                add_difference(theirs, mine, share, piece, fresh=True)
        return delta


def check_steps(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigurationError unless ``value`` is a number of steps."""
    if not is_whole(value, least):
        raise ConfigurationError(f"{name} must be a number of steps, at least {least}; got {value!r}")


def cut(tensor: Tensor, size: int) -> Sequence[Tensor]:
    """Views of ``size`` elements each, the last one of what is left."""
    split: Sequence[Tensor] = (tensor,) if tensor.numel() <= size else tensor.split(size)
    return split


PIECE_BYTES = 2**20
"""A longer message travels in pieces: one is rounded or averaged while others are on the wire."""


def add_difference(theirs: Tensor, mine: Tensor, share: float, out: Tensor, fresh: bool) -> None:
    """Add share·(theirs − mine), computed in the type of ``out``; ``fresh``: to nothing, whatever is there."""
    for a, b, result in portions(theirs, mine, out):
        if fresh:
            torch.sub(a.to(out.dtype), b, out=result).mul_(share)
        else:
            result.add_(a.to(out.dtype) - b, alpha=share)
