"""QuantizedGossip: gossip in a few bits, with partners that may change in every step, and nothing to remember of them."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.difference import add_difference
from gossamer.algorithms.blocks.meeting import Meeting, check_ahead
from gossamer.algorithms.cadence import Cadence, every
from gossamer.buckets import Bucket
from gossamer.codecs.modulo import ModuloGrid, reach, scale_blocks
from gossamer.codecs.wire import check_choice
from gossamer.comm.ops import Flow, Permute, maximum, start, wait
from gossamer.comm.topology import Dissemination, Topology, exchange_at
from gossamer.memory import wide
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
    block, and its next grid is wider. The first exchange is in full precision. A weight that is not finite is seen by all, and
    not remembered: once weights are mended, exchanges go on as before.

    Per exchange one message of bits/8 bytes per element and partner (4 bits: an eighth of fp32), and per block 4 bytes, and
    2 for each of ⌈log2 p⌉ hops. Memory: one copy of the weights, and the messages; nothing is remembered per element.
    ``ahead``: as in :class:`Gossip`; one more copy of the weights.

    Not the choice for workers that are far apart on purpose, say after many local steps with a large learning rate. Where all
    were equal and begin to differ (weights behind a gate that opens, a rate that rises from zero), it takes some ten exchanges
    until grids are as wide as they must be.

    Source: modulo quantization, Lu and De Sa 2020 (arXiv 2002.11787), Moniqua; the measured grids are ours.
    """

    bits: Bits = 4
    topology: Topology = field(default_factory=Dissemination)
    every: int = 1
    lag: int = 0
    ahead: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("bits", self.bits, Bits)
        check_ahead(self.ahead, self.lag)

    @property
    def cadence(self) -> Cadence:
        return every(self.every, lag=self.lag, topology=self.topology, ahead=self.ahead)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        weights, seen = wide(bucket.flat), state.extra(SEEN)
        seen = None if seen is None else seen.to(weights.device)  # a loaded one may lie elsewhere
        grid = None if seen is None else ModuloGrid(self.bits, seen.abs().amax(0).to(weights.dtype))
        result, steps = yield from self._meet(weights, grid, bucket, ctx)
        steps = yield from maximum(steps.to(torch.bfloat16), ctx.world)
        if seen is not None and grid is not None and not (steps.device.type == "cpu" and steps.isfinite().all()):
            # If one worker was too far away to be understood, nobody adds anything: what one adds another one gives.
            missed = steps.isinf()
            scale_blocks(result, torch.where(missed, 0.0, steps * 0 + 1))  # NaN stays NaN
            # Once is enough in training that goes its way. Where workers were equal and begin to differ, the step is wrong by
            # orders of magnitude; yet the grid that follows must not be wider than what it is to tell apart.
            wider = torch.where(seen[0] < 0, 2 ** (self.bits - 2), 2) * grid.steps.to(steps.dtype)
            steps = torch.where(missed, -wider, steps)
        # What is not finite is in this result, for all to see. A grid made of it would keep it alive, whatever the weights are.
        before = torch.full_like(steps, -_FINEST) if seen is None else seen[0]
        steps = torch.where(steps.isfinite(), steps, before)
        # Pairs that have just met are close, so it takes a whole cycle to see the distance between all of them.
        exchanges = torch.stack([steps, *(() if seen is None else seen)])
        state.set_extra(SEEN, exchanges[: self.topology.cycle(ctx.world)])
        return bucket.flat.copy_(result)  # itself, but for narrower weights and several partners

    def _meet(self, weights: Tensor, grid: ModuloGrid | None, bucket: Bucket, ctx: Context) -> Flow[tuple[Tensor, Tensor]]:
        """Exchange ``weights`` with the partners. Returns what these bring, in the memory of the weights where one partner is
        all there is, and of each block the least step that would have done: inf where this worker has not understood it."""
        message, sizes = (weights, reach(weights)) if grid is None else grid.pack(weights)
        steps, handles = least(sizes, grid), []
        for permutation in exchange_at(self.topology, ctx.step // self.every, ctx.world).permutations:
            handles.append((yield start(Permute(message, permutation))))
        if not handles:
            return weights.zero_(), steps
        share, alone = 1 / (len(handles) + 1), len(handles) == 1 and grid is not None
        if alone:
            result = weights
        elif grid is None:  # once
            result = torch.empty_like(weights)
        else:
            result = bucket.scratch("difference", weights.dtype)
        for number, handle in enumerate(handles):
            theirs = yield wait(handle)
            if grid is None:
                furthest = reach(theirs - weights)
                add_difference(theirs, weights, share, result, fresh=number == 0)
            else:
                true, furthest = grid.difference(theirs, weights, share, result, add=number > 0)
                furthest = torch.where(true, furthest, torch.inf)
            steps = torch.maximum(steps, furthest * (_ROOM / 2 ** (self.bits - 1)))
        return result, steps


SEEN = "steps that would have done"
"""``bfloat16[exchanges, blocks]``, the last exchange first, and the same on all workers. Below zero: somebody was not
understood, and this is the step to try next."""

_ROOM = 1.5
"""How many times the largest distance seen fits. Less makes rounding finer, and blocks that are not understood more frequent:
of a convnet in training it is one in sixty with 1.5, one in nine with 1, and then replicas are further apart."""

_FINEST = 2.0**-20
"""The least step relative to the largest weight: finer ones are soon below what fp32 has places for."""

_SMALLEST = 2.0**-40
"""The step for weights that are zero."""


def least(sizes: Tensor, grid: ModuloGrid | None) -> Tensor:
    """The least step that does for blocks whose largest magnitudes are ``sizes``, in their type: ``[blocks]``; inf where
    ``grid`` is so fine that places on it would be no integers, NaN where a weight is not finite."""
    steps = (sizes * _FINEST).clamp_(min=_SMALLEST)
    return (steps if grid is None else torch.where(sizes >= grid.most, torch.inf, steps)) + 0 * sizes
