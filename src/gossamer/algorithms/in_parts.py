"""InParts: an algorithm over weights that takes one part of them per step."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, Subject
from gossamer.algorithms.combination import Combination, refuse_lag
from gossamer.algorithms.schedule import BySize, Switch
from gossamer.buckets import Bucket
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.pieces import part_of
from gossamer.state import State


def in_parts(count: int, algorithm: Algorithm) -> Algorithm:
    """Of the weights, one of ``count`` even parts is exchanged in each step, all of them in turn.

    Every step sends, computes and waits for a ``count``-th of what ``algorithm`` would, and a weight meets others every
    ``count`` steps, as with ``every=count``; but the traffic is the same in every step, instead of all at once in one of
    them, so it hides behind the compute on a network that is ``count`` times slower. For each part it is as if its exchanges
    were the only ones: partners change with them, and ``every=`` or ``period=`` count them. Large tensors are cut.

    Not the choice where replicas must be as close as possible: they drift apart for ``count`` steps (16 workers, 8 parts: the
    convnet is 0.9 points of accuracy behind all-reduce after 351 steps from the start, 0.3 with all weights in every step).

    Source: ours; Streaming DiLoCo (Douillard et al. 2025, arXiv 2501.18512) averages fragments of the model in turn.
    """
    return InParts(count=count, algorithm=algorithm)


@dataclass(frozen=True, kw_only=True)
class InParts(Combination, register=False):
    """See :func:`in_parts`. ``part_number``: the only part that is meant, for a bucket's own algorithm."""

    count: int
    algorithm: Algorithm
    part_number: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.algorithm, Algorithm):
            raise ConfigurationError(f"in_parts() takes an instance of a gossamer algorithm; got {self.algorithm!r}")
        self.fuse_as(self.algorithm)
        if not is_whole(self.count, 1):
            raise ConfigurationError(f"in_parts() takes a number of parts, at least 1; got {self.count!r}")
        if isinstance(self.algorithm, Switch | BySize):
            raise ConfigurationError(
                "in_parts() goes inside after(), and does not go with by_size(), which would see pieces of tensors: write "
                "after(steps, in_parts(…))"
            )
        if self.algorithm.subject != "weights" or self.algorithm.part("gradients") is not None:
            raise ConfigurationError(
                f"in_parts(): {type(self.algorithm).__name__} moves gradients, and all of those are needed in every step; "
                "give an algorithm that moves weights, such as Gossip()"
            )
        if self.algorithm.finishes or self.algorithm.weight_parts > 1:
            raise ConfigurationError(f"in_parts(): {self.algorithm!r} needs all weights at once")
        refuse_lag(self.algorithm, "in_parts()")

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return (self.algorithm,)

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """Weights."""
        return self.algorithm.subject

    @property
    def weight_parts(self) -> int:
        return self.count

    @property
    def traffic_period(self) -> int:
        return self.count * self.algorithm.traffic_period

    def traffic_cycle(self, world: int, machines: int) -> int:
        return self.count * self.algorithm.traffic_cycle(world, machines)

    def due(self, step: int) -> bool:
        mine = self.part_number is None or step % self.count == self.part_number
        return mine and self.algorithm.due(step // self.count)

    def ahead_at(self, step: int) -> float:
        return self.algorithm.ahead_at(step // self.count)

    def route(self, name: str, tensor: Tensor) -> str:
        whole, part = part_of(name)
        return f"{'' if part is None else part}:{self.algorithm.route(whole, tensor)}"

    def of(self, label: str) -> Algorithm:
        part, _, inner = label.partition(":")
        algorithm, number = self.algorithm.of(inner), int(part) if part else None
        return replace(self, algorithm=algorithm, part_number=number)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        return (yield from self.algorithm.exchange(bucket, state, replace(ctx, step=ctx.step // self.count)))

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.algorithm.message_dtype(dtype)

    def counted(self, weights: Tensor, state: State, ctx: Context) -> Tensor:
        return self.algorithm.counted(weights, state, replace(ctx, step=ctx.step // self.count))

    def attach(self, optimizers: Any) -> Algorithm:
        return replace(self, algorithm=self.algorithm.attach(optimizers))
