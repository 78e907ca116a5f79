"""QSGD: the gradient in levels rounded at random, right on average."""

from dataclasses import dataclass, field

from gossamer.algorithms.scatter_reduce import ScatterReduce
from gossamer.codecs.base import Codec
from gossamer.codecs.quantize import Quantize


@dataclass(frozen=True, kw_only=True)
class QSGD(ScatterReduce):
    """QSGD: symmetric levels, rounded at random so that the gradient is right on average; nothing is remembered.

    Bytes and messages as in :class:`ScatterReduce` with the same bits.

    Not the choice below 8 bits for small batches: the variance of the rounding adds to that of the gradient.

    Source: Alistarh et al. 2017 (arXiv 1610.02132), with levels per block of elements.
    """

    codec: Codec = field(default_factory=lambda: Quantize(scheme="symmetric", rounding="stochastic"))
    worker_feedback: bool = False
    server_feedback: bool = False
