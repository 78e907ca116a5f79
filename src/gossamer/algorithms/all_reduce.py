"""AllReduce: the exact mean of the gradients, in fused buckets."""

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, check_gather_below
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.codecs.wire import Wire, check_wire, narrowed
from gossamer.comm.ops import SMALL, Flow, total
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class AllReduce(Algorithm):
    """Every worker uses the mean gradient of all: DDP's result, over GradientFlow's lazy (fused) all-reduce.

    Per bucket and step, one ring all-reduce: 2·(p−1)/p of the gradient's bytes (half of that with a 16-bit
    ``wire``), in 2·(p−1) messages that wait for each other. A bucket of which a worker would receive at most ``gather_below``
    bytes is gathered whole from all instead. With ``overlap_forward`` that limit is at least 256 kB: such a bucket is needed
    soon, and each message of a ring would wait behind longer buckets on the link. The mean is divided before the wire, because
    a half-precision sum overflows.

    Not the choice when the network is the bottleneck and the accuracy can stand less than exact gradients.

    Source: Sun et al. 2019 (arXiv 1902.06855), section on lazy all-reduce; C_FP_S of Gan et al. 2021 (arXiv 2107.01499).
    """

    bucket_bytes: int = 2**22
    wire: Wire = "fp32"
    gather_below: int = SMALL

    def __post_init__(self) -> None:
        super().__post_init__()
        check_wire("wire", self.wire)
        check_gather_below(self.gather_below)

    @property
    def traits(self) -> Traits:
        return Traits(exact=True, takes_shares=True, prompt=True, keeps_unsent=False)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return bucket.flat
        share = bucket.flat if bucket.holds_shares else bucket.flat.mul_(1 / ctx.world)
        # A narrow wire needs a copy; full precision does not.
        sent = share if self.wire == "fp32" else share.to(narrowed(share.dtype, self.wire))
        mean = yield from total(sent, ctx.world, max(self.gather_below, _BESIDE_LONGER) if ctx.overtakes else self.gather_below)
        return share if mean is share else share.copy_(mean)


_BESIDE_LONGER = 2**18
"""Bytes up to which a bucket is gathered that is needed before longer ones, which are on the line."""
