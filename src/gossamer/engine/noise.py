"""Noise: the gradient noise scale, from the squared norms of gradients before and after they are averaged.

McCandlish et al. (2018), appendix A: with |g|² of one worker's gradient and |ḡ|² of the mean of p, the squared norm of the true
gradient is (p·|ḡ|² − |g|²)/(p − 1), and the trace of the covariance of one worker's is (|g|² − |ḡ|²)·p/(p − 1). Their ratio is
the noise scale in batches of one worker: so many workers' gradients hold as much noise as signal.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from gossamer.buckets import Bucket
from gossamer.memory import wide

_KEPT = 0.95
"""How much of what was known before a step is kept after it: means of about twenty steps."""


class NoiseScale:
    """Means of squared norms over steps, bucket by bucket. Costs two passes over the gradients in every step.

    Each bucket is written by the flow that exchanges it alone.
    """

    def __init__(self, world: int) -> None:
        self._world = world
        self._norms: dict[int, tuple[float, float, float]] = {}
        """By bucket: the sum of weights, and of |g|² and |ḡ|² by weight."""

    def before(self, bucket: Bucket) -> float:
        """|g|² of what is about to be averaged."""
        return _squared(bucket.flat) * (self._world**2 if bucket.holds_shares else 1)

    def after(self, index: int, own: float, result: Tensor) -> None:
        """Note what the exchange of a bucket gave."""
        weight, local, mean = (_KEPT * kept for kept in self._norms.get(index, (0.0, 0.0, 0.0)))
        self._norms[index] = weight + 1, local + own, mean + _squared(result)

    def forget(self) -> None:
        """Buckets are others now."""
        self._norms = {}

    def sums(self) -> tuple[float, float]:
        """|g|² and |ḡ|² of all buckets, in the mean over steps."""
        known = list(self._norms.values())
        return sum(local / weight for weight, local, _ in known), sum(mean / weight for weight, _, mean in known)


def noise_scale(sums: Iterable[tuple[float, float]], world: int) -> float | None:
    """The noise scale in batches of one worker, from :meth:`NoiseScale.sums` of ranks; None if noise hides the signal."""
    locals_, means = zip(*sums, strict=True)
    local, mean = sum(locals_) / len(locals_), sum(means) / len(means)
    signal = (world * mean - local) / (world - 1) if world > 1 else 0.0
    return (local - mean) * world / (world - 1) / signal if signal > 0 else None


def _squared(flat: Tensor) -> float:
    return float(torch.linalg.vector_norm(wide(flat))) ** 2
