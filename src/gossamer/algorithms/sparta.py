"""SPARTA: a few weights, drawn at random, averaged in every step beside any algorithm that exchanges them all now and then."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms import cadence as cadences
from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.blocks.mean import way_to_peers
from gossamer.algorithms.blocks.refusals import refuse_lag
from gossamer.algorithms.cadence import Cadence, every
from gossamer.algorithms.diloco import DiLoCo
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.codecs.kernels.layout import keys
from gossamer.codecs.sparse import RandomK, check_density
from gossamer.comm.mixing import check_pattern
from gossamer.comm.ops import Flow, Group
from gossamer.comm.topology import Topology
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.pieces import OF
from gossamer.state import State


def sparta(algorithm: Algorithm, *, share: float = 0.005, topology: Topology | None = None) -> Algorithm:
    """``algorithm`` over weights, such as ``DiLoCo()``, and in each step in which it exchanges nothing the average of a
    ``share`` of the weights: others in every step, drawn by the step, the same on all workers.

    The few keep replicas close between two exchanges of all, for a hundredth of the bytes, and the mean of the workers stays as
    it is. ``topology``: each worker averages them with its peers of that step; by default all do. Moments are not among them.

    Per step an all-reduce, or a message for each peer, of ``share`` of the weights, and what ``algorithm`` sends in its steps.
    Not the choice where it exchanges in nearly every step anyway, or takes ``delay`` for more than one.

    Source: Beton et al. 2025 (SPARTA: Distributed training with sparse parameter averaging).

    Raises:
        ConfigurationError: ``share`` is none; or ``algorithm`` exchanges gradients, may lag, is added late, or has ``outlier``.
    """
    return Sparta(algorithm=algorithm, share=share, topology=topology)


@dataclass(frozen=True, kw_only=True)
class Sparta(Algorithm, register=False):
    """See :func:`sparta`."""

    algorithm: Algorithm
    share: float = 0.005
    topology: Topology | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm) or self.algorithm.subject != "weights" or self.algorithm.part("gradients"):
            raise ConfigurationError(
                "sparta() takes an algorithm over weights, such as DiLoCo(), and is put inside of what averages gradients too, "
                f"as in after(300, sparta(DiLoCo())) and Hierarchical(sparta(DiLoCo())); got {self.algorithm!r}"
            )
        super().__post_init__()
        check_density(self.share, "share")
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise ConfigurationError(f"sparta(): topology must be None, or one such as Ring(); got {self.topology!r}")
        refuse_lag(self.algorithm, "sparta()")
        cadence, chooses = self.algorithm.cadence, isinstance(self.algorithm, DiLoCo) and self.algorithm.outlier is not None
        if cadence.late or cadence.parts > 1 or max(cadence.delays, default=0) > 1 or chooses:
            raise ConfigurationError(
                f"sparta(): weights of all workers are averaged in each step, and {self.algorithm!r} has them under way for "
                "longer, or in parts, or leaves some out: take delay=1 or 0, no parts, and no outlier"
            )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, by_samples=False)  # some weights count by a step, others by a period

    @property
    def cadence(self) -> Cadence:
        return cadences.joined([self.algorithm.cadence, every(1, topology=self.topology)])

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        super().check(world, nodes)
        if self.topology is not None:
            check_pattern(self.topology, world)  # that all learn from all is up to ``algorithm``

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        return self.algorithm.route(name, tensor) if OF in name else super().route(name, tensor)  # no moments

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # the weights themselves, of which few travel

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        if self.algorithm.cadence.due(ctx.step):
            return (yield from self.algorithm.exchange(bucket, state, ctx))
        if ctx.world == 1 or not bucket.flat.numel():
            return bucket.flat.zero_()
        weights, seed = wide(bucket.flat), replace(ctx, rank=0).seed(bucket.index)  # the same on all workers
        places, _ = RandomK(density=self.share).drawn(keys(seed), weights.numel(), weights.device)
        changes = yield from way_to_peers(weights[places], self.topology, ctx)
        return weights.zero_().index_copy_(0, places, changes).to(bucket.flat.dtype)
