"""DESLOC: local steps after which weights and Adam's two moments become their means, each after periods of its own."""

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms import cadence as cadences
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.meeting import check_steps
from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.local_sgd import LocalSGD
from gossamer.algorithms.traits import Traits
from gossamer.pieces import OF, SQUARES, part_of


@dataclass(frozen=True, kw_only=True)
class DESLOC(LocalSGD):
    """:class:`LocalSGD` that also averages what the optimizer remembers of each weight: the weights every ``every`` steps,
    first moments (momentum) every ``first·every``, and second moments, which change most slowly, every ``second·every``.

    Moments then belong to the weights that all go on from, and a worker that joins gets them. Second moments stay at zero or
    above. ``delay`` and ``merge`` are for all of them.

    Per exchange the messages of an all-reduce for weights, for first and for second moments; with Adam, and periods of 1, 3 and
    6 times ``every``, half as many bytes more than :class:`LocalSGD`. Not the choice with an optimizer that remembers nothing
    (SGD without momentum): there it is :class:`LocalSGD`.

    Source: Iacob et al. 2025 (arXiv 2505.22549).
    """

    first: int = 3
    second: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("first", self.first)
        check_steps("second", self.second)

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", history=True, by_samples=True, dense=self.dense_steps)

    @property
    def cadence(self) -> Cadence:
        return cadences.joined(self._every(times).cadence for times in (1, self.first, self.second))

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        key, of, _ = part_of(name)[0].partition(OF)
        return self._every(1 if not of else self.second if key in SQUARES else self.first)

    def _every(self, times: int) -> "WithHistory":
        same = {"delay": self.delay, "merge": self.merge, "lag": self.lag, "bucket_bytes": self.bucket_bytes}
        return WithHistory(every=self.every * times, **same)  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class WithHistory(LocalSGD, register=False):
    """For one of the three."""

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", history=True, by_samples=True)
