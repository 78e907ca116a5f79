"""Parts: the flow in which every worker averages one part of a tensor, and everything travels encoded."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms.base import Context
from gossamer.codecs.base import Codec
from gossamer.codecs.kernels.meta import standing_for
from gossamer.codecs.residual import keep
from gossamer.comm.ops import SMALL, AllGather, AllToAll, Flow, all_gather, start, wait

_ALIGNMENT = 64  # elements; a part begins at a whole byte of every code, and at a cache line


@dataclass(frozen=True, slots=True)
class Feedback:
    """Who makes up for what its encoding has lost: the workers, when they send; the servers, when they send the mean."""

    worker: bool = True
    server: bool = True

    @property
    def any(self) -> bool:
        """Whether anything is remembered."""
        return self.worker or self.server

    @property
    def all(self) -> bool:
        """Whether nothing that is lost is forgotten."""
        return self.worker and self.server


def scatter_reduce(
    flat: Tensor,
    unsent: Tensor | None,
    codec: Codec,
    ctx: Context,
    index: int,
    mean: Tensor,
    rest: Tensor | None,
    feedback: Feedback = Feedback(),
    gather_below: int = SMALL,
) -> Flow[None]:
    """The mean of ``flat + unsent`` over several workers into ``mean``; what this worker leaves unsent into ``rest``.

    With all ``feedback``, ``rest`` may be ``flat`` itself: no element of it is read once its remainder is written. Or ``mean``
    may be, which is begun when all remainders are written. ``unsent`` and ``rest`` may have fewer bits.

    Long tensors go in pieces: one is encoded or decoded while those before it are on the wire. A tensor of which at most
    ``gather_below`` bytes arrive is gathered whole from all workers instead, in one round of messages.
    """
    if rest is not None and not feedback.all:
        rest.zero_()  # nobody writes all of it
    if (ctx.world - 1) * payload_bytes(codec, flat.numel(), flat.dtype) <= gather_below:
        yield from Piece(codec, ctx, index, feedback, flat, unsent, mean, rest).gather()
        return
    size = elements_per_piece(codec, flat.numel(), flat.dtype)
    pieces = []
    for number, begin in enumerate(range(0, max(1, flat.numel()), size)):
        cut, seeds = slice(begin, begin + size), index + number * _MANY_BUCKETS
        own, kept = None if unsent is None else unsent[cut], None if rest is None else rest[cut]
        pieces.append(Piece(codec, ctx, seeds, feedback, flat[cut], own, mean[cut], kept))
    scattered, gathered = deque[Any](), []
    for number in range(len(pieces) + _AHEAD):
        if number < len(pieces):
            scattered.append((yield start(AllToAll(pieces[number].shares()))))
        if number >= _AHEAD:
            arrived = yield wait(scattered.popleft())
            gathered.append((yield start(AllGather(pieces[number - _AHEAD].reduce(arrived)))))
    for piece, handle in zip(pieces, gathered, strict=True):
        piece.assemble((yield wait(handle)))


PIECE_BYTES = 2**19
"""About the payload of a piece: several messages of less each would cost more than they hide."""

_AHEAD = 2
"""How many pieces are on their way when the first one is waited for. Long operations are posted by the thread that waits."""

_MANY_BUCKETS = 2**20
"""More than there are: pieces of different buckets have different seeds."""


@lru_cache(maxsize=1024)
def payload_bytes(codec: Codec, numel: int, dtype: torch.dtype) -> int:
    """How long the payload of a tensor is."""
    payload = codec.encode(torch.empty(numel, dtype=dtype, device="meta"))
    return payload.numel() * payload.element_size()


@lru_cache(maxsize=1024)
def elements_per_piece(codec: Codec, numel: int, dtype: torch.dtype) -> int:
    """Into how long pieces a tensor is cut."""
    pieces = max(1, round(payload_bytes(codec, numel, dtype) / PIECE_BYTES))
    return max(_ALIGNMENT, -(-numel // (pieces * _ALIGNMENT)) * _ALIGNMENT)


@dataclass(frozen=True, slots=True)
class Parts:
    """A tensor of ``numel`` elements cut into one part per worker, all of one ``size`` but the last ones."""

    numel: int
    world: int

    @property
    def size(self) -> int:
        """Elements of a whole part."""
        share = -(-self.numel // self.world)
        return -(-share // _ALIGNMENT) * _ALIGNMENT

    def of(self, flat: Tensor, rank: int) -> Tensor:
        """The part of ``rank``; shorter, or empty, at the end."""
        size = self.size
        return flat[rank * size : (rank + 1) * size]


def whole(part: Tensor, size: int) -> Tensor:
    """The part with zeros up to ``size``: messages are all of one length."""
    return part if part.numel() == size else pad(part, (0, size - part.numel()))


@dataclass(frozen=True, slots=True)
class Piece:
    """One piece of a tensor on its way: to those who average a part each, and back."""

    codec: Codec
    ctx: Context
    index: int
    feedback: Feedback
    flat: Tensor
    unsent: Tensor | None
    mean: Tensor
    rest: Tensor | None

    @property
    def parts(self) -> Parts:
        """Who averages what."""
        return Parts(self.flat.numel(), self.ctx.world)

    def shares(self) -> Tensor:
        """``uint8[world, n]`` (or the codec's dtype): the payload for every worker. Its own part stays here, exact."""
        world, own = self.ctx.world, self.ctx.rank
        if self.flat.is_meta and world > 1:
            with standing_for(world - 1):
                payload = self._encode((own + 1) % world)
            return payload.new_empty((world, *payload.shape))
        payloads = [self._encode(rank) for rank in range(world) if rank != own]
        payloads.insert(own, torch.zeros_like(payloads[0]))
        return torch.stack(payloads)

    def _encode(self, rank: int) -> Tensor:
        """The payload for ``rank``."""
        seed = self.ctx.seed(self.index, rank)
        # Whatever the feedback: where parts were cut differently, or nobody used a parameter, there may be residuals anywhere.
        unsent = None if self.unsent is None else self._at(rank, self.unsent)
        rest = self._at(rank, self.rest) if self.feedback.worker and self.rest is not None else None
        return _encode(self.codec, self._at(rank, self.flat), unsent, seed, rest, self.parts.size)

    def gather(self) -> Flow[None]:
        """Whole, from all workers to all, once: who averages has nothing more to encode, so nothing more to lose."""
        numel, seed = self.flat.numel(), self.ctx.seed(self.index, self.ctx.rank)
        rest = self.rest if self.feedback.worker else None
        payloads = yield from all_gather(_encode(self.codec, self.flat, self.unsent, seed, rest, numel))
        self.mean.zero_()
        for payload in _each(payloads):
            self.codec.add_decoded(payload, self.mean)
        self.mean.div_(self.ctx.world)

    def reduce(self, arrived: Tensor) -> Tensor:
        """The payload of the mean of this worker's part."""
        parts, ctx = self.parts, self.ctx
        mine = self._at(ctx.rank, self.flat)
        total = whole(mine.clone() if self.unsent is None else mine + self._at(ctx.rank, self.unsent), parts.size)
        for rank, payload in enumerate(_each(arrived)):
            if rank != ctx.rank or arrived.is_meta:
                self.codec.add_decoded(payload, total)
        total /= ctx.world
        seed = ctx.seed(self.index, ctx.world)
        rest = self._at(ctx.rank, self.rest) if self.feedback.server and self.rest is not None else None
        left = rest if rest is None or rest.dtype == total.dtype else torch.empty_like(total[: mine.numel()])
        payload = _encode(self.codec, total[: mine.numel()], None, seed, left, parts.size)
        if rest is not None and left is not None:
            largest = torch.finfo(left.dtype).max
            left.mul_(ctx.world).clamp_(-largest, largest)  # the mean lacks this much, so the sum lacks p times as much
            if left is not rest:
                keep(left, rest, seed)
        return payload

    def assemble(self, gathered: Tensor) -> None:
        """The whole mean from the payloads of its parts."""
        for rank, payload in enumerate(_each(gathered)):
            place = self._at(rank, self.mean)
            if place.numel() == self.parts.size:
                self.codec.decode_into(payload, place)
            else:
                place.copy_(self.codec.decode(payload, self.parts.size, place.dtype)[: place.numel()])

    def _at(self, rank: int, tensor: Tensor) -> Tensor:
        return self.parts.of(tensor, rank)


def _each(payloads: Tensor) -> Iterator[Tensor]:
    """The payload of every worker. Without values they are alike, and one stands for all: a prediction for thousands of workers
    would be nothing but these."""
    if payloads.is_meta and len(payloads):
        with standing_for(len(payloads)):
            yield payloads[0]
    else:
        yield from payloads


def _encode(codec: Codec, part: Tensor, unsent: Tensor | None, seed: int, rest: Tensor | None, size: int) -> Tensor:
    """The payload of ``part + unsent``, which may be shorter than ``size``; what it does not carry goes into ``rest``."""
    if rest is None:
        return codec.encode(whole(part if unsent is None else part + unsent, size), seed)
    if part.numel() == size:
        return codec.encode_keeping(part, unsent, seed, rest)
    payload, left = codec.encode_rest(whole(part, size), None if unsent is None else whole(unsent, size), seed)
    keep(left[: rest.numel()], rest, seed)
    return payload
