"""ScatterReduce: every worker averages one part of the gradient; everything travels encoded."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from gossamer.algorithms.base import Context, check_gather_below
from gossamer.algorithms.blocks.lossy import Lossy, check_codec, turn_over, with_unsent
from gossamer.algorithms.blocks.parts import Feedback, scatter_reduce
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.codecs.base import Codec
from gossamer.codecs.error_feedback import check_decay, faded
from gossamer.codecs.quantize import Quantize
from gossamer.codecs.wire import Wire, check_wire, narrowed
from gossamer.comm.ops import SMALL, Flow
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State


@dataclass(frozen=True, kw_only=True)
class ScatterReduce(Lossy):
    """BAGUA's C_LP_S: worker ``i`` sends Q(xⱼ + δ) of part ``j`` to worker ``j``, which averages and sends Q(mean + ε) to all.

    δ and ε are what was lost before (``worker_feedback``, ``server_feedback``; the released code of BAGUA has neither).
    Both live in one residual per element: a worker keeps δ for the parts that it sends, and for its own part, which it
    need not send, p·ε. So a residual is this worker's unsent part of the sum, wherever parts are cut. It is multiplied by
    ``decay`` before it is sent.

    Per bucket and step 2·(p−1)/p of the encoded gradient (with 8 bits, a quarter of an all-reduce), in two rounds of
    messages. A bucket of which a worker would receive at most ``gather_below`` bytes is gathered whole from all, in one round:
    messages that wait for each other also wait for what is queued before them. All workers decode the same payloads, so they
    stay bit-identical. Memory: one residual per element, in 16 bits (``residual="fp32"``: in full precision).

    Not the choice when messages, not bytes, are what costs: p−1 small ones go out twice per bucket. With 8 or 4 bits
    training ends where an all-reduce does; with ``Sign()``, which lets out large values over many steps, it does not
    (7 points of accuracy behind in a short run), least of all with Adam: there take :class:`~gossamer.optim.OneBitAdam`.

    Source: Gan et al. 2021 (arXiv 2107.01499), C_LP_S.
    """

    codec: Codec = field(default_factory=Quantize)
    worker_feedback: bool = True
    server_feedback: bool = True
    residual: Wire = "bf16"
    decay: float = 1.0
    gather_below: int = SMALL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("residual", self.residual)
        check_decay(self.decay)
        check_codec(self.codec, remembers=self.traits.keeps_unsent)
        check_gather_below(self.gather_below)

    @property
    def traits(self) -> Traits:
        return Traits(keeps_unsent=self.worker_feedback or self.server_feedback)

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        return with_unsent(flat, state, self.decay)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return (yield from self.among_one(bucket, state, ctx))
        flat = wide(bucket.flat)
        feedback = Feedback(self.worker_feedback, self.server_feedback)
        unsent = faded(state.get(RESIDUAL), self.decay) if feedback.any else None
        rest: Tensor | None
        if feedback.all:
            rest, mean = turn_over(bucket, flat, state, self.residual)
        else:
            rest = None
            if feedback.any:
                rest = state.fresh(RESIDUAL, flat, narrowed(flat.dtype, self.residual))
            mean = bucket.fresh() if flat is bucket.flat else torch.empty_like(flat)
        yield from scatter_reduce(flat, unsent, self.codec, ctx, bucket.index, mean, rest, feedback, self.gather_below)
        if rest is not None:
            state[RESIDUAL] = rest
        return mean.to(bucket.flat.dtype)
