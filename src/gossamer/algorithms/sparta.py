"""SPARTA: a few weights, drawn at random, averaged in every step beside any algorithm that exchanges them all now and then."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms import cadence as cadences
from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.blocks.refusals import refuse_lag
from gossamer.algorithms.cadence import Cadence, every
from gossamer.algorithms.diloco import DiLoCo
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.codecs.kernels.layout import keys
from gossamer.codecs.sparse import RandomK, check_density
from gossamer.comm.ops import Flow, all_reduce, permute
from gossamer.comm.topology import Topology
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import State


def sparta(algorithm: Algorithm, *, share: float = 0.005, topology: Topology | None = None) -> Algorithm:
    """``algorithm`` over weights, such as ``DiLoCo()``, and in each step in which it exchanges nothing the average of a
    ``share`` of the weights: others in every step, drawn by the step, the same on all workers.

    The few that are averaged keep replicas close between two exchanges of all, for a hundredth of the bytes. ``topology``: each
    worker averages them with its peers of that step; by default all do. The mean of the workers stays what it is.

    Per step the messages of an all-reduce, or one for each peer, of ``share`` of the weights, and those of ``algorithm`` in its
    own steps. Not the choice where ``algorithm`` exchanges in nearly every step anyway, or takes ``delay`` for more than one.

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
        algorithm = self.algorithm
        if not isinstance(algorithm, Algorithm) or algorithm.subject != "weights" or algorithm.part("gradients") is not None:
            raise ConfigurationError(
                "sparta() takes an algorithm over weights, such as DiLoCo(), and is put inside of what averages gradients too, "
                f"as in after(300, sparta(DiLoCo())) and Hierarchical(sparta(DiLoCo())); got {algorithm!r}"
            )
        super().__post_init__()
        check_density(self.share, "share")
        if self.topology is not None and not isinstance(self.topology, Topology):
            raise ConfigurationError(f"sparta(): topology must be None, or one such as Ring(); got {self.topology!r}")
        refuse_lag(algorithm, "sparta()")
        cadence = algorithm.cadence
        chooses = isinstance(algorithm, DiLoCo) and algorithm.outlier is not None
        if cadence.late or cadence.parts > 1 or any(beat.delay > 1 for beat in cadence.beats) or chooses:
            raise ConfigurationError(
                f"sparta(): weights of all workers are averaged in each step, and {algorithm!r} has them under way for longer, "
                "or in parts, or leaves some out: take delay=1 or 0, no parts, and no outlier"
            )

    @property
    def traits(self) -> Traits:
        return replace(super().traits, by_samples=False)  # some weights count by a step, others by a period

    @property
    def cadence(self) -> Cadence:
        return cadences.joined([self.algorithm.cadence, every(1, topology=self.topology)])

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # the weights themselves, of which few travel

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        if self.algorithm.cadence.due(ctx.step):
            return (yield from self.algorithm.exchange(bucket, state, ctx))
        if ctx.world == 1 or not bucket.flat.numel():
            return bucket.flat.zero_()
        seed = replace(ctx, rank=0).seed(bucket.index)  # the same on all workers
        places, _ = RandomK(density=self.share).drawn(keys(seed), bucket.flat.numel(), bucket.flat.device)
        weights = wide(bucket.flat)
        changes = yield from self._changes(weights[places], ctx)
        return weights.zero_().index_copy_(0, places, changes).to(bucket.flat.dtype)

    def _changes(self, own: Tensor, ctx: Context) -> Flow[Tensor]:
        """What brings these weights to their mean over all workers, or over the peers."""
        if self.topology is None:
            return (yield from all_reduce(own / ctx.world)) - own
        total, peers = torch.zeros_like(own), self.topology.at(ctx.step, ctx.world).permutations
        for permutation in peers:
            total += (yield from permute(own, permutation)) - own
        return total / (len(peers) + 1)
