"""ChunkSparse: only the chunks of the gradient that matter most travel, the same ones on every worker."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.blocks.chunks import Chosen, evenly, mask_of_largest, take_share
from gossamer.algorithms.blocks.lossy import Lossy, Memories, bounded, check_codec, leave_out, turn_over
from gossamer.algorithms.blocks.momentum_all_reduce import MomentumAllReduce, without_momentum
from gossamer.algorithms.blocks.parts import scatter_reduce
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.codecs.base import Codec
from gossamer.codecs.cast import Cast
from gossamer.codecs.kernels import chunk_norms
from gossamer.codecs.residual import accumulate, rounded
from gossamer.codecs.sparse import check_chunk, check_density, share_of
from gossamer.codecs.wire import Wire, check_wire
from gossamer.comm.ops import AllReduce, Flow, decide, start, total, wait
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import MOMENTUM, RESIDUAL, State

CHOSEN, NORMS = "chosen chunks", "chunk norms"


@dataclass(frozen=True, kw_only=True)
class ChunkSparse(Lossy):
    """GradientFlow's coarse-grained sparse communication.

    The gradient is cut into chunks of ``chunk`` elements. At the end of a step the workers all-reduce the L1 norms that
    their chunks are expected to have next: of the residual plus the gradient of this step. They choose the largest
    ``density`` of all chunks. In the next step each bucket packs its chosen chunks into one dense all-reduce, during the
    backward pass. What is not sent is kept and added to the next gradient.

    For ``warmup`` steps everything is sent; over the next ``ramp`` steps the density falls exponentially to its value. Both
    count from the start of the run, so ``after(500, ChunkSparse(warmup=500, ramp=100))`` ends its ramp at step 600.

    ``codec``: a :class:`Cast` (its dtype is summed on the wire), or any other codec for the packed chunks, which then
    are scatter-reduced.

    ``momentum_correction`` accumulates momentum before the choice (u ← m·u + g is what is kept and sent), and takes it
    out of the optimizer, which must be SGD with momentum, until the replica is closed; that of vectors and of the weight
    decay is accumulated beside it, so that at density 1 all is SGD with momentum (Lin et al. also clear u where a chunk is
    sent; here it stays, as in SGD). Without it, the optimizer's own momentum acts on what arrives. Not inside ``after`` or
    ``by_size``, whose other part would have none. Leave out ``momentum``, which comes from the optimizer.

    Per step as many messages as an all-reduce of every bucket and one more of 4 bytes per chunk; ``density`` of its bytes,
    in the codec's precision. Memory: one residual per element, in 16 bits (``residual="fp32"``: in full precision), and one
    momentum with ``momentum_correction``. Vectors (``exact_vectors``) are not sparse.

    Not the choice for models of a few thousand parameters, or where no step may use a gradient that is many steps old.
    In a run of a few hundred steps the convnet loses 2 points of accuracy at density 0.1, and 0.4 if the first third of the
    run is exact (``after(…, ChunkSparse())``). Not with Adam, which divides by what comes every tenth step ten times
    as large: the GPT ends 0.4 nats behind. There :class:`ScatterReduce` or 1-bit Adam do better (``docs/algorithms.md`` has
    the figures).

    Source: Sun et al. 2019 (arXiv 1902.06855); momentum and warm-up as in Lin et al. 2018 (arXiv 1712.01887).
    """

    density: float = 0.1
    chunk: int = 2048
    codec: Codec = field(default_factory=lambda: Cast(wire="fp16"))
    warmup: int = 0
    ramp: int = 0
    momentum_correction: bool = False
    momentum: float = 0.0
    residual: Wire = "bf16"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("residual", self.residual)
        check_density(self.density)
        check_chunk(self.chunk)
        check_codec(self.codec)
        if 4 * self.chunk > self.bucket_bytes:
            raise ConfigurationError(
                f"a chunk of {self.chunk} elements is larger than a bucket of {self.bucket_bytes} bytes: "
                "choose a smaller chunk or larger bucket_bytes"
            )
        if not (is_whole(self.warmup, 0) and is_whole(self.ramp, 0)):
            raise ConfigurationError(f"warmup and ramp are numbers of steps; got {self.warmup!r} and {self.ramp!r}")
        if self.momentum != 0:
            raise ConfigurationError("momentum is the optimizer's, taken from it by momentum_correction=True; leave it out")

    @property
    def traits(self) -> Traits:
        return Traits(takes_momentum=self.momentum_correction)

    def density_at(self, step: int) -> float:
        """The share of chunks sent at ``step``."""
        if step < self.warmup:
            return 1.0
        part = 1.0 if self.ramp == 0 else min(1.0, (step - self.warmup) / self.ramp)
        return float(self.density**part)

    @property
    def exactly(self) -> Algorithm:
        if self.momentum:
            return MomentumAllReduce(bucket_bytes=self.bucket_bytes, momentum=self.momentum)
        return super().exactly

    def attach(self, parameters: Sequence[Tensor], momentum: float) -> Algorithm:
        if not self.momentum_correction:
            return self
        attached = copy.copy(self)
        object.__setattr__(attached, "momentum", momentum)  # which __init__ refuses
        return attached

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return (yield from self.among_one(bucket, state, ctx))
        flat, unsent = wide(bucket.flat), state[RESIDUAL]
        kept, result = turn_over(bucket, flat, state, self.residual)
        memories = [(kept, unsent)]
        if self.momentum:
            memories.append((torch.add(flat, state[MOMENTUM], alpha=self.momentum), state[MOMENTUM]))
            state[MOMENTUM] = velocity = memories[1][0]
            flat.copy_(velocity)
        chosen = self._chosen(state, flat)
        came = chosen.pack(flat)
        packed = came + chosen.pack(unsent)  # in the wider type of the two
        if isinstance(self.codec, Cast):
            sent = take_share(packed, self.codec, ctx.world)
            handle = yield start(AllReduce(sent))
            self._keep(state, flat, memories, chosen, came, packed, ctx.seed(bucket.index))  # while it travels
            result.zero_()
            del came, packed  # in the first step they are as large as the gradient, and other buckets are under way too
            summed = yield wait(handle)
            mean = self.codec.decode(summed, summed.numel(), result.dtype)
        else:
            mean, lost = torch.empty_like(packed), torch.empty_like(packed)
            yield from scatter_reduce(packed, None, self.codec, ctx, bucket.index, mean, lost)
            self._keep(state, flat, memories, chosen, came, lost, ctx.seed(bucket.index))
            result.zero_()
        chosen.unpack(mean, result)
        return result.to(bucket.flat.dtype)

    def put_back(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        return super().put_back(without_momentum(mean, place, state, self.momentum), place, state, ctx)

    def _keep(
        self, state: State, flat: Tensor, memories: Memories, chosen: Chosen, came: Tensor, lost: Tensor, seed: int
    ) -> None:
        """Keep back what is not sent: everything, and of the chunks that are sent what their encoding has ``lost``."""
        kept, unsent = memories[0]
        norms = leave_out(accumulate(flat, unsent, self.chunk, seed, kept), memories)
        norms[chosen.indices] = chunk_norms(came, lost, self.chunk)
        chosen.unpack(rounded(lost, kept.dtype, seed), kept)
        state.set_extra(NORMS, bounded(norms))
        state[RESIDUAL] = kept

    def _chosen(self, state: State, flat: Tensor) -> Chosen:
        """The chunks to send; all of them until there was a choice."""
        mask, chunks = state.extra(CHOSEN), -(-flat.numel() // self.chunk)
        if mask is None or mask.numel() != chunks:
            return Chosen.of(flat, self.chunk, torch.arange(chunks, device="cpu"))
        return Chosen.of(flat, self.chunk, mask.cpu().nonzero().flatten())  # a loaded one may lie elsewhere

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None]:
        """Choose the chunks of the next step, over all buckets."""
        norms = [norm for each in states if (norm := each.extra(NORMS)) is not None]
        if ctx.world == 1 or not norms:  # all ranks have dropped every step so far, because of an overflow
            return
        mine = torch.cat(norms) / ctx.world
        norm = yield from total(mine if mine.device.type == "meta" else mine.cpu(), ctx.world)
        count = share_of(norm.numel(), self.density_at(ctx.step + 1))
        default = evenly(norm.numel(), count)
        mask = yield decide("chunks", default, lambda: mask_of_largest(norm, count))
        for each, part in zip(states, mask.split([norm.numel() for norm in norms]), strict=True):
            each.set_extra(CHOSEN, part.clone())
