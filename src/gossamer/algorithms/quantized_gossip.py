"""QuantizedGossip: gossip in a few bits, with partners that may change in every step, and nothing to remember of them."""

from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms.base import Context
from gossamer.algorithms.gossip import Meeting
from gossamer.algorithms.lossy import wide
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, Permute, decide, maximum, start, wait
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

    The grid's step, one for each 4096 weights, is set for the next exchange from the largest distance that any worker has
    seen in a whole cycle of the topology (one maximum over all workers, a hundredth of the message, while the next step computes), with
    room for twice that. (With room for four times, rounding sets the distance; with 1.2 times, every fifth exchange does not
    fit.) A checksum tells whether what was taken for the sender's weights are these. If not, nobody adds anything to this
    bucket, and its next exchange is in full precision, as is the first.

    Per exchange one message of bits/8 bytes per element and partner (4 bits: an eighth of fp32). Nothing is remembered per
    element. Not the choice for workers that are far apart on purpose, say after many local steps with a large learning rate.

    Source: modulo quantization, Lu and De Sa 2020 (arXiv 2002.11787), Moniqua; the measured grid is ours.
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
        steps = None if seen is None else self._steps(seen)
        if steps is not None and not (yield decide("on the grid", True, partial(all_positive, steps))):
            steps = None
        places = None if steps is None else on_grid(weights, steps)
        message = weights if places is None else pack(places, self.bits)
        handles = []
        for permutation in partners:
            handles.append((yield start(Permute(message, permutation))))
        delta, apart = torch.zeros_like(weights), torch.zeros_like(largest(weights))
        for handle in handles:
            theirs = yield wait(handle)
            if places is None or steps is None:
                difference = theirs - weights
            else:
                ahead, true = nearest(theirs, places, self.bits)
                difference = off_grid(ahead, steps, weights.dtype) * true
                apart = torch.where(true, apart, torch.inf)
            delta.add_(difference, alpha=1 / (len(handles) + 1))
            apart = torch.maximum(apart, largest(difference))
        # What any worker has seen in this exchange; on one that nobody met it is 0.
        now = yield from maximum(torch.stack([apart, largest(weights)]), ctx.world)
        if steps is not None:
            # If one worker was too far away to be understood, nobody adds anything: what one adds another one gives.
            delta = torch.where(now[0].isfinite().all(), delta, 0.0)
        state.set_extra(SEEN, self._remembered(seen if steps is not None else None, now, ctx.world))
        return bucket.flat.copy_(delta)  # nothing reads the weights' copy any more

    def _remembered(self, seen: Tensor | None, now: Tensor, world: int) -> Tensor:
        """``float64[exchanges, 2, blocks]``: the largest distances and weights of the last exchanges; −1 where unknown.

        Pairs that have just met are close, so it takes a whole cycle to see the distance between all of them.
        """
        now = torch.where(now.isfinite().all(0), now, -1.0).unsqueeze(0)
        return now if seen is None else torch.cat([now, seen])[: self.topology.cycle(world)]

    def _steps(self, seen: Tensor) -> Tensor:
        """The grid's step for each block: ``float64[blocks]``; 0 where it is not known."""
        apart, size = seen.amax(0)
        wanted = torch.maximum(apart * (_ROOM / 2 ** (self.bits - 1)), size * _FINEST).clamp(min=2.0**-120)
        return torch.where((seen >= 0).all(0).all(0), wanted, 0.0)


SEEN = "largest distances and weights"

_ROOM = 2.0
"""How many times the largest distance seen fits: less makes rounding finer, and leaps that do not fit more frequent."""

_FINEST = 2.0**-22
"""A step relative to the largest weight below which fp32 has no places in between."""


def all_positive(tensor: Tensor) -> bool:
    """Whether every element is above zero."""
    return bool((tensor > 0).all())


BLOCK = 2**12
"""Elements that share a step of the grid. A whole tensor's largest difference would be a hundred times what most elements
differ by; a message for every few elements would be as long as what they are told in."""


def blocks(tensor: Tensor) -> Tensor:
    """``[⌈n / BLOCK⌉, BLOCK]``: a flat tensor, with zeros at the end."""
    rows = -(-tensor.numel() // BLOCK)
    return pad(tensor, (0, rows * BLOCK - tensor.numel())).view(rows, BLOCK)


def largest(tensor: Tensor) -> Tensor:
    """The largest magnitude in each block: ``float64[blocks]``."""
    return torch.linalg.vector_norm(blocks(tensor), torch.inf, dim=1).double()


def on_grid(weights: Tensor, steps: Tensor) -> Tensor:
    """The place of each weight on its block's grid, ``int32``: the weight is about place · step."""
    scaled = blocks(weights) * (1 / steps.to(weights.dtype)).unsqueeze(1)
    return scaled.round_().to(torch.int32).view(-1)[: weights.numel()]


def off_grid(places: Tensor, steps: Tensor, dtype: torch.dtype) -> Tensor:
    """What places, or differences of places, stand for."""
    return (blocks(places.to(dtype)) * steps.to(dtype).unsqueeze(1)).view(-1)[: places.numel()]


def pack(places: Tensor, bits: int) -> Tensor:
    """The last ``bits`` bits of each place, several to a byte, a plane apart, and a checksum: ``uint8[⌈n·bits/8⌉ + 8]``."""
    per_byte = 8 // bits
    plane = -(-places.numel() // per_byte)
    codes = places.new_zeros(per_byte * plane, dtype=torch.uint8)
    codes[: places.numel()] = places & (2**bits - 1)
    packed = codes[:plane].clone()
    for number in range(1, per_byte):
        packed |= codes[number * plane : (number + 1) * plane] << (bits * number)
    return torch.cat([packed, checksum(places)])


def checksum(places: Tensor) -> Tensor:
    """A linear hash, in 8 bytes. Places that are wrong by whole turns, some up and some down, change it: each counts with
    a random factor of its own. Sums and products wrap around."""
    pieces = places.split(_HASHED)
    factors, factors_of_pieces = _factors(_HASHED, places.device), _factors(len(pieces), places.device)
    sums = torch.stack([(piece * factors[: piece.numel()]).sum(dtype=torch.int64) for piece in pieces])
    return (sums * factors_of_pieces).sum().reshape(1).view(torch.uint8)


_HASHED = 2**16
"""Elements that are hashed at a time: they and their factors stay in a cache."""


@lru_cache(maxsize=64)
def _factors(count: int, device: torch.device) -> Tensor:
    """``int32[count]``: odd numbers, the same everywhere."""
    factors = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    return (factors | 1).to(device)


def unpack(packed: Tensor, bits: int, numel: int) -> Tensor:
    """What :func:`pack` was given, modulo 2^bits: ``int32[numel]``."""
    planes = [(packed[:-8] >> (bits * number)) & (2**bits - 1) for number in range(8 // bits)]
    return torch.cat(planes)[:numel].to(torch.int32)


def nearest(packed: Tensor, places: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """How far the sender's places are from ``places``: of all with these last bits, the nearest. And whether they are his."""
    half = 2 ** (bits - 1)
    ahead = ((unpack(packed, bits, places.numel()) - places + half) & (2**bits - 1)) - half
    return ahead, (checksum(places + ahead) == packed[-8:]).all()
