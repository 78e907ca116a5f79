"""BySize: one algorithm for small parameters, another one for large ones."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, parts_of
from gossamer.algorithms.blocks.refusals import check_parts
from gossamer.buckets import Bucket
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.state import State


def by_size(threshold: int, *, small: Algorithm, large: Algorithm) -> Algorithm:
    """``small`` for parameters below ``threshold`` bytes, ``large`` for the others, in buckets of their own."""
    return BySize(threshold=threshold, small=small, large=large)


@dataclass(frozen=True, kw_only=True)
class BySize(Algorithm, register=False):
    """See :func:`by_size`."""

    threshold: int
    small: Algorithm
    large: Algorithm

    def __post_init__(self) -> None:
        check_parts(self.small, self.large)
        super().__post_init__()
        small, large = self.small, self.large
        if small.cadence.parts > 1 or large.cadence.parts > 1:
            raise ConfigurationError("by_size() does not go with in_parts(), which would have it see pieces of tensors")
        if not is_whole(self.threshold, 0):
            raise ConfigurationError(f"by_size() takes a number of bytes; got {self.threshold!r}")
        if len(parts_of(self)) < 2:
            return
        if small.cadence.late != large.cadence.late or small.cadence.delays != large.cadence.delays:
            raise ConfigurationError(
                "by_size(): what its two parts bring must be added at one time: give both the same late= and delay="
            )
        if small.subject != large.subject:
            raise ConfigurationError(
                f"by_size(): {type(small).__name__} moves {small.subject}, {type(large).__name__} moves "
                f"{large.subject}; both must move the same"
            )

    def _of(self, nbytes: int) -> Algorithm:
        return self.small if nbytes < self.threshold else self.large

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        return self._of(tensor.numel() * tensor.element_size()).route(name, tensor)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        return (yield from self._of(bucket.layout.nbytes).exchange(bucket, state, ctx))
