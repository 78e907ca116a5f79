"""QuantizedGossip: gossip in a few bits, with partners that may change in every step, and nothing to remember of them."""

from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.gossip import Meeting
from gossamer.algorithms.lossy import wide
from gossamer.buckets import Bucket
from gossamer.codecs.modulo import ModuloGrid, largest, pieces, scale_blocks
from gossamer.comm.ops import Flow, Permute, maximum, start, wait
from gossamer.comm.topology import Dissemination, Topology
from gossamer.errors import ConfigurationError
from gossamer.state import State

Bits = Literal[8, 4]


@dataclass(frozen=True, kw_only=True)
class QuantizedGossip(Meeting):
    """As :class:`Gossip`, but only the last ``bits`` bits of each weight's place on a fine grid travel.

    Workers that meet hold nearly the same weights, so the receiver knows the leading bits: of all places with these last
    bits it takes the one nearest to its own weight. The grid is as fine as the workers are close, so rounding stays below the
    distance between replicas, whatever the size of the weights; plain rounding to 4 bits keeps them 5 % apart.
    ``w ← w + ½·(place_partner − place_own)`` in whole steps of the grid: it cancels exactly in the mean over the workers.

    Each block of 512 weights has a grid of its own, with room for 1.5 times the largest distance that any worker has seen
    there in a whole cycle of the topology (a maximum over all workers, 2 bytes per block, while the next step computes). A
    checksum per block tells whether what was taken for the sender's weights are these. If not, nobody adds anything to this
    block, and its next grid is twice as wide. The first exchange is in full precision.

    Per exchange one message of bits/8 bytes per element and partner (4 bits: an eighth of fp32), and per block 4 bytes, and
    2 for each of ⌈log2 p⌉ hops. Memory: one copy of the weights, and the messages; nothing is remembered per element.

    Not the choice for workers that are far apart on purpose, say after many local steps with a large learning rate.

    Source: modulo quantization, Lu and De Sa 2020 (arXiv 2002.11787), Moniqua; the measured grids are ours.
    """

    bits: Bits = 4
    topology: Topology = field(default_factory=Dissemination)
    every: int = 1
    lag: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits not in get_args(Bits) or isinstance(self.bits, bool):
            raise ConfigurationError(f"bits must be one of {', '.join(map(str, get_args(Bits)))}; got {self.bits!r}")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        weights = wide(bucket.flat)
        partners = self.topology.at(ctx.step // self.every, ctx.world).permutations
        seen = state.extra(SEEN)
        grid = None if seen is None else ModuloGrid(self.bits, seen.amax(0).to(weights.dtype))
        message = weights if grid is None else grid.pack(weights)
        handles = []
        for permutation in partners:
            handles.append((yield start(Permute(message, permutation))))
        delta, wanted = None, finest(weights)
        for handle in handles:
            theirs = yield wait(handle)
            if delta is None:  # not before: it is needed for those buckets only whose message has come
                delta = torch.zeros_like(weights)
            for elements, rows in pieces(weights):
                own = weights[elements]
                ahead, true = (theirs[elements] - own, None) if grid is None else grid.difference(theirs, own, rows)
                delta[elements].add_(ahead, alpha=1 / (len(handles) + 1))
                step = largest(ahead) * (_ROOM / 2 ** (self.bits - 1))
                wanted[rows] = torch.maximum(wanted[rows], step if true is None else torch.where(true, step, torch.inf))
        weights = weights.zero_() if delta is None else weights.copy_(delta)
        del delta
        now = yield from maximum(wanted.to(torch.bfloat16), ctx.world)
        if grid is not None:
            # If one worker was too far away to be understood, nobody adds anything: what one adds another one gives.
            missed = now.isinf()
            scale_blocks(weights, torch.where(missed, 0.0, now * 0 + 1))  # NaN stays NaN
            now = torch.where(missed, 2 * grid.steps.to(now.dtype), now)
        # Pairs that have just met are close, so it takes a whole cycle to see the distance between all of them.
        exchanges = torch.stack([now, *(() if seen is None else seen)])
        state.set_extra(SEEN, exchanges[: self.topology.cycle(ctx.world)])
        return bucket.flat.copy_(weights)  # nothing reads the weights' copy any more


SEEN = "steps that would have done"
"""``bfloat16[exchanges, blocks]``, the same on all workers."""

_ROOM = 1.5
"""How many times the largest distance seen fits. Less makes rounding finer, and blocks that are not understood more frequent:
with 1.5 it is one in sixty, with 1 one in nine, and replicas are further apart."""

_FINEST = 2.0**-22
"""A step relative to the largest weight below which fp32 has no places in between."""


def finest(weights: Tensor) -> Tensor:
    """The least step for each block of weights: ``[blocks]``."""
    sizes = torch.cat([largest(weights[elements]) for elements, _ in pieces(weights)])
    return (sizes * _FINEST).clamp_(min=2.0**-120)
