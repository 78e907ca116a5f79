"""LowPrecisionDecentralized: gossip on a fixed graph, in compressed differences to what the neighbours know already."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.difference import add_difference
from gossamer.algorithms.blocks.lossy import check_codec, leave_out
from gossamer.algorithms.blocks.meeting import Meeting
from gossamer.buckets import Bucket
from gossamer.checks import is_number
from gossamer.codecs.base import Codec
from gossamer.codecs.contraction import contraction
from gossamer.codecs.quantize import Quantize
from gossamer.comm.ops import Flow, Group, Permute, start, wait
from gossamer.comm.topology import Ring, Topology, exchange_at
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class LowPrecisionDecentralized(Meeting):
    """BAGUA's D_LP_S: every worker keeps a replica of each neighbour's weights, as far as they were sent, and one of its own.
    The message is the compressed difference Q(w − own replica), which updates all replicas:
    ``ŵ ← ŵ + Q(w − ŵ)``, then ``w ← w + rate · Σ_j share·(ŵ_j − ŵ)`` over the neighbours j.

    Differences shrink as the replicas catch up, so that the error of a coarse codec shrinks with them, and does not stay
    at a fraction of the weights. D_LP_S itself makes ``ŵ`` the weights, so that what rounding lost is lost from the mean of
    the workers as well; here only differences of replicas are added, which cancel in the mean, whatever the codec.

    ``codec``: any codec without error feedback (the replica is one) that brings a replica closer, which ``RandomK`` made
    unbiased does not. ``rate``: the part of the way that one exchange goes; by default 1 for 8 and 4 bits, and for coarser
    codecs a quarter of what they bring a replica closer by (``codecs/contraction.py``): with more, replicas may run apart.
    ``topology``: a graph that is the same in every step. ``lag``: asynchronous, as in :class:`Gossip`; the replicas are those
    of an exchange, whenever it is.

    A weight that is not finite shows in the result; replicas stay there as they were, so that it goes once weights are mended.

    The first exchange is in full precision. Per exchange and neighbour one message of the encoded weights (8 bits: a
    quarter). Memory: one replica per neighbour and one more, each as before an exchange and as
    after it, and a copy of the weights. Not the choice if that is too much, or for partners that change.

    Source: Tang et al. 2018 (arXiv 1803.06443) and Gan et al. 2021 (arXiv 2107.01499), D_LP_S; in the form that keeps
    the mean, Koloskova et al. 2019 (arXiv 1902.00340), CHOCO.
    """

    codec: Codec = field(default_factory=Quantize)
    topology: Topology = field(default_factory=Ring)
    rate: float | None = None
    every: int = 1
    lag: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_codec(self.codec)
        if self.rate is not None and not (is_number(self.rate) and 0 < self.rate <= 1):
            raise ConfigurationError(f"rate must be a number above 0 and at most 1, or None; got {self.rate!r}")
        if contraction(self.codec) <= 0:
            raise ConfigurationError(f"{self.codec!r} brings no replica closer to what it stands for: take one with less loss")

    @property
    def pace(self) -> float:
        """The ``rate`` that is used."""
        if self.rate is not None:
            return self.rate
        closer = contraction(self.codec)
        return 1.0 if closer > _FINE else closer / 4

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        super().check(world, nodes)
        if self.topology.cycle(world) > 1:
            raise ConfigurationError(
                f"{type(self).__name__} keeps replicas of its neighbours, who must be the same in every step; "
                f"{self.topology} changes them: take Ring() or Complete(), or Gossip"
            )

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        weights, partners = wide(bucket.flat), exchange_at(self.topology, 0, ctx.world).permutations
        rate = self.pace / (len(partners) + 1)
        first = OWN not in state
        # The same seed everywhere: workers that agree send the same, and stay where they are.
        seed = replace(ctx, rank=0).seed(bucket.index)
        payload = weights.clone() if first else self.codec.encode(weights - state[OWN], seed)
        handles = []
        for permutation in partners:
            handles.append((yield start(Permute(payload, permutation))))
        memories = [self._follow(OWN, payload, weights, state, first)]
        own = memories[0][0]
        delta = weights.zero_()  # what was sent and what is remembered are copies
        for number, handle in enumerate(handles):
            memories.append(self._follow(f"{FROM} {number}", (yield wait(handle)), weights, state, first))
            add_difference(memories[-1][0], own, rate, delta, fresh=False)
        # What is not finite is in the result; in a replica it would stay for ever. Peers that keep this replica have the
        # same bits, now and before, and go back to the same.
        leave_out(torch.linalg.vector_norm(delta if handles else own), memories)
        return bucket.flat.copy_(delta)

    def _follow(self, key: str, payload: Tensor, like: Tensor, state: State, first: bool) -> tuple[Tensor, Tensor]:
        """The replica ``key`` after a message, the same bits on both sides; and as it was before."""
        before, replica = state[key], state.fresh(key, like)
        if first:
            replica.copy_(payload)
        else:
            replica.copy_(before)
            self.codec.add_decoded(payload, replica)
        state[key] = replica
        return replica, before


OWN, FROM = "replica", "replica of neighbour"

_FINE = 0.9
"""The contraction above which a codec needs no smaller rate."""
