"""Gathered: the mean of what all workers send to all, each for itself what it finds worth sending."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.lossy import Lossy, check_codec, turn_over, with_unsent
from gossamer.algorithms.blocks.shares import factor
from gossamer.buckets import Bucket
from gossamer.codecs.base import Codec
from gossamer.codecs.error_feedback import check_decay, faded
from gossamer.codecs.top_per_chunk import TopPerChunk
from gossamer.codecs.wire import Wire, check_wire
from gossamer.comm.ops import Flow, all_gather
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State


@dataclass(frozen=True, kw_only=True)
class Gathered(Lossy, register=False):
    """Each worker sends Q(x + decay·residual) to all others, and all take the mean; what Q leaves out is the new residual.

    For sparse codecs, with which a sum of messages has more elements than each. ``clip``: a message that is longer (in the L2
    norm of what it decodes to) than the median of all counts only with that length. Where outer deltas count by samples, one
    may be as many times longer as its worker has more samples than the mean.
    """

    codec: Codec = field(default_factory=TopPerChunk)
    decay: float = 1.0
    clip: bool = False
    residual: Wire = "bf16"
    exact_vectors: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_codec(self.codec)
        check_decay(self.decay)
        check_wire("residual", self.residual)

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        return with_unsent(flat, state, self.decay)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return (yield from self.among_one(bucket, state, ctx))
        flat, had = wide(bucket.flat), faded(state.get(RESIDUAL), self.decay)
        rest, mean = turn_over(bucket, flat, state, self.residual)
        payloads = yield from all_gather(self.codec.encode_keeping(flat, had, ctx.seed(bucket.index), rest))
        state[RESIDUAL] = rest
        times = torch.ones(ctx.world, dtype=mean.dtype, device=mean.device)
        if self.clip and ctx.samples is not None:
            counts = yield from all_gather(times.new_tensor([ctx.samples], dtype=torch.float64))
            times = factor(counts.flatten(), slice(None)).to(mean.dtype)
        shares = self._shares(payloads, mean, times) / ctx.world
        mean.zero_()
        for payload, share in zip(payloads, shares, strict=True):
            mean.addcmul_(self.codec.decode(payload, mean.numel(), mean.dtype), share)
        return mean.to(bucket.flat.dtype)

    def _shares(self, payloads: Tensor, like: Tensor, times: Tensor) -> Tensor:
        """With what each message counts: NaN where one is not finite. What is in one was scaled by ``times``, for its samples,
        and may be as much longer; what is kept from before was not, so that one of no samples may be as long as the median."""
        if not self.clip:
            return torch.ones_like(times)
        norms = torch.stack([self.codec.norm(payload, like.numel(), like.dtype) for payload in payloads])
        median = torch.where((times > 0) & norms.isfinite(), norms / times, torch.nan).nanquantile(0.5)
        longest = median * times.clamp(min=1) / norms.clamp(min=torch.finfo(norms.dtype).tiny)
        return torch.where(median > 0, longest.clamp(max=1), norms * 0 + 1)
