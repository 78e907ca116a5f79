"""InParts: an algorithm over weights that takes one part of them per step."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.after import Phases
from gossamer.algorithms.base import Algorithm, Context, finishes
from gossamer.algorithms.blocks.refusals import refuse_lag
from gossamer.algorithms.by_size import BySize
from gossamer.algorithms.cadence import Cadence
from gossamer.buckets import Bucket
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.pieces import part_of
from gossamer.state import State


def in_parts(count: int, algorithm: Algorithm, *, strides: int = 1) -> Algorithm:
    """Of the weights, one of ``count`` even parts is exchanged at a time, all of them in turn.

    Every exchange sends, computes and waits for a ``count``-th of what that of ``algorithm`` would, which is made as often, and
    a weight is exchanged ``count`` times more seldom: ``in_parts(8, LocalSGD(every=4))`` exchanges a part every 4 steps, and
    each weight every 32. Traffic that would all be in one step is spread evenly. For each part it is as if its exchanges
    were the only ones: partners change with them, and ``every=`` or ``period=`` count them. Large tensors are cut.

    ``strides``: a part is one stretch of the weights, in the order of the model's parameters, so that it holds neighbouring
    layers; with more strides it is made of so many shorter stretches, all over the model.

    Not the choice where replicas must be as close as possible: they drift apart for ``count`` steps (16 workers, 8 parts: the
    convnet is 0.9 points of accuracy behind all-reduce after 351 steps from the start, 0.3 with all weights in every step).

    Source: ours; Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) averages fragments of the model in turn.
    """
    return InParts(count=count, algorithm=algorithm, strides=strides)


@dataclass(frozen=True, kw_only=True)
class InParts(Algorithm, register=False):
    """See :func:`in_parts`. ``part_number``: the only part that is meant, for a bucket's own algorithm; ``spacing``: of the
    exchanges of two parts, in those of the weights, which what belongs to them goes with."""

    count: int
    algorithm: Algorithm
    strides: int = 1
    part_number: int | None = None
    spacing: int | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise ConfigurationError(f"in_parts() takes an instance of a gossamer algorithm; got {self.algorithm!r}")
        super().__post_init__()
        if not is_whole(self.count, 1):
            raise ConfigurationError(f"in_parts() takes a number of parts, at least 1; got {self.count!r}")
        if not is_whole(self.strides, 1):
            raise ConfigurationError(f"in_parts(): strides must be a number of stretches, at least 1; got {self.strides!r}")
        if isinstance(self.algorithm, Phases | BySize):
            raise ConfigurationError(
                "in_parts() goes inside after(), and does not go with by_size(), which would see pieces of tensors: write "
                "after(steps, in_parts(…))"
            )
        if self.algorithm.subject != "weights" or self.algorithm.part("gradients") is not None:
            raise ConfigurationError(
                f"in_parts(): {type(self.algorithm).__name__} moves gradients, and all of those are needed in every step; "
                "give an algorithm that moves weights, such as Gossip()"
            )
        if finishes(self.algorithm) or self.algorithm.cadence.parts > 1:
            raise ConfigurationError(f"in_parts(): {self.algorithm!r} needs all weights in one exchange")
        if any(beat.offset for beat in self.algorithm.cadence.beats):
            raise ConfigurationError(f"in_parts(): {self.algorithm!r} exchanges the same weights at two steps of a period")
        if len({beat.every for beat in self.algorithm.route("weight", torch.empty(1)).cadence.beats}) > 1:
            raise ConfigurationError(
                f"in_parts(): {self.algorithm!r} exchanges one weight after several periods, and parts would take turns in each"
            )
        refuse_lag(self.algorithm, "in_parts()")

    @cached_property
    def cadence(self) -> Cadence:
        return self.algorithm.cadence.in_parts(self.count, self.part_number, self.strides, self.spacing)

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        whole, part = part_of(name)
        number = None if part is None else part % self.count
        handler = self._with(lambda algorithm: algorithm.route(whole, tensor))
        return replace(handler, part_number=number, spacing=self.algorithm.cadence.spacing)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        """For each part it is as if its exchanges were the only ones."""
        return (yield from self.algorithm.exchange(bucket, state, replace(ctx, step=ctx.step // self.count)))
