"""ByteGrad: the gradient in 8 bits, without error feedback."""

from dataclasses import dataclass

from gossamer.algorithms.scatter_reduce import ScatterReduce


@dataclass(frozen=True, kw_only=True)
class ByteGrad(ScatterReduce):
    """BAGUA's 8-bit all-reduce as released: block-wise min-max, rounded to nearest, without error feedback.

    Bytes and messages as in :class:`ScatterReduce`. Not the choice when a residual per element can be afforded.

    Source: Gan et al. 2021 (arXiv 2107.01499).
    """

    worker_feedback: bool = False
    server_feedback: bool = False
