"""ScatterReduce: every worker averages one part of the gradient; everything travels encoded."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from gossamer.algorithms.base import Context
from gossamer.algorithms.lossy import Lossy, wide
from gossamer.buckets import Bucket
from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Wire, check_wire, wire_codec
from gossamer.codecs.error_feedback import ErrorFeedback
from gossamer.codecs.quantize import Quantize
from gossamer.comm.ops import Flow, all_gather, all_to_all
from gossamer.errors import ConfigurationError
from gossamer.state import State

RESIDUAL = "residual"
_ALIGNMENT = 64  # elements; a part begins at a whole byte of every code, and at a cache line


@dataclass(frozen=True, kw_only=True)
class ScatterReduce(Lossy):
    """BAGUA's C_LP_S: worker ``i`` sends Q(xⱼ + δ) of part ``j`` to worker ``j``, which averages and sends Q(mean + ε) to all.

    δ and ε are what was lost before (``worker_feedback``, ``server_feedback``; the released code of BAGUA has neither).
    Both live in one residual per element: a worker keeps δ for the parts that it sends, and for its own part, which it
    need not send, p·ε. So a residual is what this worker still owes to the sum, wherever parts are cut.

    Per bucket and step 2·(p−1)/p of the encoded gradient (with 8 bits, a quarter of an all-reduce), in two rounds of
    messages. All workers decode the same payloads, so they stay bit-identical. Memory: one residual per element.

    Not the choice when messages, not bytes, are what costs: p−1 small ones go out twice per bucket.

    Source: Gan et al. 2021 (arXiv 2107.01499), C_LP_S.
    """

    codec: Codec = field(default_factory=Quantize)
    worker_feedback: bool = True
    server_feedback: bool = True
    residual: Wire = "fp32"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("residual", self.residual)
        if not isinstance(self.codec, Codec):
            raise ConfigurationError(f"codec must be a codec, such as Quantize(bits=8); got {self.codec!r}")
        if isinstance(self.codec, ErrorFeedback):
            raise ConfigurationError("give the codec alone: worker_feedback and server_feedback are the error feedback")

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        remembers = self.worker_feedback or self.server_feedback
        owed = wide(state[RESIDUAL]) if remembers and RESIDUAL in state else None
        mean, rest = yield from scatter_reduce(
            wide(bucket.flat), owed, self.codec, ctx, bucket.index, self.worker_feedback, self.server_feedback
        )
        if rest is not None:
            state[RESIDUAL] = rest.to(wire_codec(self.residual).wire_dtype(rest.dtype))
        return mean.to(bucket.flat.dtype)


def scatter_reduce(
    flat: Tensor, owed: Tensor | None, codec: Codec, ctx: Context, index: int, worker: bool = True, server: bool = True
) -> Flow[tuple[Tensor, Tensor | None]]:
    """The mean of ``flat + owed`` over the workers, and what this worker owes from now on (None without any feedback)."""
    if ctx.world == 1:
        return flat.clone() if owed is None else flat + owed, torch.zeros_like(flat) if worker or server else None
    parts = Parts(flat.numel(), ctx.world)
    rest = torch.zeros_like(flat) if worker or server else None
    messages = [
        _encode(codec, parts, rank, flat, owed if worker else None, rest if worker else None, ctx.seed(index, rank))
        for rank in range(ctx.world)
        if rank != ctx.rank
    ]
    messages.insert(ctx.rank, torch.zeros_like(messages[0]))  # its own part stays here, exact
    arrived = yield from all_to_all(torch.stack(messages))
    mine = parts.of(flat, ctx.rank)
    total = mine.clone() if owed is None else mine + parts.of(owed, ctx.rank)
    _add_all(codec, [row for rank, row in enumerate(arrived) if rank != ctx.rank], total, parts.size)
    total /= ctx.world
    payload = _encode_mean(codec, parts, total, rest if server else None, ctx, index)
    gathered = yield from all_gather(payload)
    return _assemble(codec, parts, gathered, flat), rest


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
        return flat[rank * self.size : (rank + 1) * self.size]


def whole(part: Tensor, size: int) -> Tensor:
    """The part with zeros up to ``size``: messages are all of one length."""
    return part if part.numel() == size else pad(part, (0, size - part.numel()))


def _encode(codec: Codec, parts: Parts, rank: int, flat: Tensor, owed: Tensor | None, rest: Tensor | None, seed: int) -> Tensor:
    """The payload for ``rank``; what it does not carry goes into ``rest``."""
    mine = whole(parts.of(flat, rank), parts.size)
    before = None if owed is None else whole(parts.of(owed, rank), parts.size)
    if rest is None:
        return codec.encode(mine if before is None else mine + before, seed)
    payload, left = codec.encode_rest(mine, before, seed)
    place = parts.of(rest, rank)
    place.copy_(left[: place.numel()])
    return payload


def _encode_mean(codec: Codec, parts: Parts, mean: Tensor, rest: Tensor | None, ctx: Context, index: int) -> Tensor:
    padded = whole(mean, parts.size)
    if rest is None:
        return codec.encode(padded, ctx.seed(index, ctx.world))
    payload, left = codec.encode_rest(padded, None, ctx.seed(index, ctx.world))
    # The mean lacks this much, so the sum lacks p times as much.
    torch.mul(left[: mean.numel()], ctx.world, out=parts.of(rest, ctx.rank))
    return payload


def _add_all(codec: Codec, payloads: Sequence[Tensor], total: Tensor, size: int) -> None:
    """Add what payloads of whole parts stand for to ``total``, which may be a shorter one."""
    if total.numel() == size:
        for payload in payloads:
            codec.add_decoded(payload, total)
    else:
        padded = whole(total, size)
        _add_all(codec, payloads, padded, size)
        total.copy_(padded[: total.numel()])


def _assemble(codec: Codec, parts: Parts, gathered: Tensor, like: Tensor) -> Tensor:
    """The whole mean from the payloads of its parts."""
    mean = torch.empty_like(like)
    for rank, payload in enumerate(gathered):
        place = parts.of(mean, rank)
        place.copy_(codec.decode(payload, parts.size, mean.dtype)[: place.numel()])
    return mean
