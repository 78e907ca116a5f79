"""InOptimizer: nothing is exchanged but what the optimizer itself asks for."""

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, Subject
from gossamer.algorithms.cadence import NEVER, Cadence
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.errors import UsageError
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class InOptimizer(Algorithm, register=False):
    """The algorithm of a replica whose optimizer communicates inside its own step (``gossamer.optim.OneBitAdam``)."""

    @property
    def traits(self) -> Traits:
        return Traits(keeps_unsent=False)

    @property
    def cadence(self) -> Cadence:
        return NEVER

    def part(self, subject: Subject) -> Algorithm | None:
        return None

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        raise UsageError("the optimizer communicates by itself")
