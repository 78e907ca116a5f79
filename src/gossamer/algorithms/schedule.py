"""Schedule: which algorithm when, and which for what: combinations that are algorithms themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context, Subject
from gossamer.algorithms.combination import Combination, check_parts, joined, split, total
from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State


def after(steps: int, then: Algorithm, *, before: Algorithm | None = None) -> Algorithm:
    """``before`` (exact all-reduce by default) for ``steps`` steps, ``then`` from there on.

    ``steps`` counts backward passes outside ``no_sync()``, as ``replica.step`` does.

    What ``before`` still owes when it ends (a residual) is added to the first gradient that ``then`` communicates, so that
    nothing is lost; if ``then`` moves weights, to the gradient of that step, which each worker keeps to itself, and travels in
    the weights (that of a parameter which nobody uses in that step is lost). One may move gradients and the other weights;
    where ``then`` moves gradients, replicas stay as far apart as they are when it begins (``close(average=True)`` brings them
    together).
    """
    return Switch(steps=steps, then=then, before=AllReduce() if before is None else before)


def by_size(threshold: int, *, small: Algorithm, large: Algorithm) -> Algorithm:
    """``small`` for parameters below ``threshold`` bytes, ``large`` for the others, in buckets of their own."""
    return BySize(threshold=threshold, small=small, large=large)


@dataclass(frozen=True, kw_only=True)
class Switch(Combination, register=False):
    """See :func:`after`. Either part may be missing: then nothing is exchanged in its time."""

    steps: int
    then: Algorithm | None
    before: Algorithm | None = field(default_factory=AllReduce)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.steps, 0):
            raise ConfigurationError(f"after() takes a number of steps; got {self.steps!r}")
        check_parts(self.then, self.before)
        if self.parts:
            self.fuse_as(self.parts[-1])
        if len({part.weight_parts for part in self.parts} - {1}) > 1:
            raise ConfigurationError("after(): both are in_parts(), of different numbers; weights are cut once")
        if self.lands_late and any(part.ahead_at(self.steps) for part in self.parts):
            raise ConfigurationError(
                "after(): one part has late=True, and then the averages of both are added after the update that ahead= foresees"
            )

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return tuple(part for part in (self.before, self.then) if part is not None)

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """Weights, as soon as one of the parts moves them."""
        return "weights" if any(part.subject == "weights" for part in self.parts) else "gradients"

    @property
    def changes(self) -> frozenset[int]:
        return super().changes | {self.steps}

    @property
    def weight_parts(self) -> int:
        return max((part.weight_parts for part in self.parts), default=1)

    @property
    def workers_per_machine(self) -> int | None:
        """As the part says whose time lasts, else as the other one."""
        said = [part.workers_per_machine for part in reversed(self.parts)]
        return next((number for number in said if number is not None), None)

    def at(self, step: int) -> Algorithm | None:
        """The part whose time it is."""
        return self.before if step < self.steps else self.then

    def gradients_apart(self, ctx: Context) -> int:
        part = self.at(ctx.step)
        return 1 if part is None else part.gradients_apart(ctx)

    def ahead_at(self, step: int) -> float:
        part = self.at(step)
        return 0.0 if part is None else part.ahead_at(step)

    def due(self, step: int) -> bool:
        part = self.at(step)
        if part is None:
            return self._hands_over and step == self.steps
        return part.due(step)

    @property
    def _hands_over(self) -> bool:
        """Whether there is a part that may owe something to the gradients."""
        return self.steps > 0 and self.before is not None and self.before.subject == "gradients"

    def part(self, subject: Subject) -> Algorithm | None:
        before, then = (None if a is None else a.part(subject) for a in (self.before, self.then))
        if before is None and then is None:
            return None
        return replace(self, before=before, then=then)

    def route(self, name: str, tensor: Tensor) -> str:
        return joined(*("" if a is None else a.route(name, tensor) for a in (self.before, self.then)))

    def of(self, label: str) -> Algorithm:
        before, then = split(label)
        return replace(
            self,
            before=None if self.before is None else self.before.of(before),
            then=None if self.then is None else self.then.of(then),
        )

    def overtaking(self) -> "Switch":
        before, then = (None if a is None else a.overtaking() for a in (self.before, self.then))
        return replace(self, before=before, then=then)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """That of both parts, if it is one."""
        said = {part.message_dtype(dtype) for part in self.parts}
        return said.pop() if len(said) == 1 else dtype

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        part, handed = self.at(ctx.step), bucket
        if ctx.step >= self.steps:
            handed = self._handed_over(bucket, state, ctx)
        if part is None:
            return handed.flat.to(bucket.flat.dtype)
        result = yield from part.exchange(handed, state.scoped(self._scope(ctx.step)), ctx)
        return result.to(bucket.flat.dtype) if self.subject == "gradients" else result

    def _handed_over(self, bucket: Bucket, state: State, ctx: Context) -> Bucket:
        """The bucket, with what is owed from before added to it; from then on that is forgotten."""
        owed = None
        if self.before is not None and self._hands_over:
            owed = total([self.before.owed(state.scoped(_BEFORE), ctx), state.get(RESIDUAL)])
            state.scoped(RESIDUAL).forget()
        state.scoped(_BEFORE).forget()
        # In full precision on every worker, whether it owes or not: messages must be of one type.
        flat = wide(bucket.flat) if self._hands_over and ctx.step == self.steps else bucket.flat
        if owed is not None:
            flat = flat + owed.to(flat.dtype)
        return bucket if flat is bucket.flat else bucket.holding(flat)

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        part, scope = self.at(ctx.step), self._scope(ctx.step)
        return None if part is None else part.finish(buckets, [s.scoped(scope) for s in states], state.scoped(scope), ctx)

    def _scope(self, step: int) -> str:
        return _BEFORE if step < self.steps else _THEN

    def owed(self, state: State, ctx: Context) -> Tensor | None:
        scopes = (self.before, _BEFORE), (self.then, _THEN)
        debts = [part.owed(state.scoped(scope), ctx) for part, scope in scopes if part is not None]
        return total([*debts, state.get(RESIDUAL)])

    def owe(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        part = self.at(ctx.step)
        if part is not None and part.owe(mean, place, state.scoped(self._scope(ctx.step)), ctx):
            return True
        # What was handed over was not used: it is handed over again. All workers know alike whether it was.
        if not self._may_have_handed_over(state, ctx.step):
            return False
        if state.written(RESIDUAL) is None:
            state[RESIDUAL] = torch.zeros_like(wide(state[RESIDUAL]))
        return super().owe(mean, place, state, ctx)

    def _may_have_handed_over(self, state: State, step: int) -> bool:
        """Whether this exchange may have had something in it that was owed from before."""
        if step < self.steps or self.before is None or self.then is None or not self._hands_over:
            return False
        return (step == self.steps and self.before.keeps_back) or RESIDUAL in set(state)

    def counted(self, weights: Tensor, state: State, ctx: Context) -> Tensor:
        part = self.at(ctx.step)
        if part is None or not part.weighs:
            return weights
        return part.counted(weights, state.scoped(self._scope(ctx.step)), ctx)

    def attach(self, optimizers: Sequence[Optimizer]) -> Algorithm:
        before, then = (None if a is None else a.attach(optimizers) for a in (self.before, self.then))
        return replace(self, before=before, then=then)


_BEFORE, _THEN = "before: ", "then: "

_NOTHING = Switch(steps=0, then=None, before=None)
"""Never due."""


@dataclass(frozen=True, kw_only=True)
class BySize(Combination, register=False):
    """See :func:`by_size`."""

    threshold: int
    small: Algorithm
    large: Algorithm

    def __post_init__(self) -> None:
        super().__post_init__()
        check_parts(self.small, self.large)
        self.fuse_as(self.large)
        if self.small.weight_parts > 1 or self.large.weight_parts > 1:
            raise ConfigurationError("by_size() does not go with in_parts(), which would have it see pieces of tensors")
        if not is_whole(self.threshold, 0):
            raise ConfigurationError(f"by_size() takes a number of bytes; got {self.threshold!r}")
        if _NOTHING in self.parts:
            return
        if self.small.lands_late != self.large.lands_late:
            raise ConfigurationError("by_size(): what its two parts bring must be added at one time: give both the same late=")
        if self.small.subject != self.large.subject:
            raise ConfigurationError(
                f"by_size(): {type(self.small).__name__} moves {self.small.subject}, {type(self.large).__name__} moves "
                f"{self.large.subject}; both must move the same"
            )

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return self.small, self.large

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """That of both."""
        return self.large.subject if self.small == _NOTHING else self.small.subject

    def part(self, subject: Subject) -> Algorithm | None:
        small, large = self.small.part(subject), self.large.part(subject)
        if small is None and large is None:
            return None
        return replace(self, small=_NOTHING if small is None else small, large=_NOTHING if large is None else large)

    def route(self, name: str, tensor: Tensor) -> str:
        which = "small" if tensor.numel() * tensor.element_size() < self.threshold else "large"
        part = self.small if which == "small" else self.large
        return f"{which}:{part.route(name, tensor)}"

    def of(self, label: str) -> Algorithm:
        which, _, inner = label.partition(":")
        return (self.small if which == "small" else self.large).of(inner)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        part = self.small if bucket.layout.nbytes < self.threshold else self.large
        return (yield from part.exchange(bucket, state, ctx))

    def due(self, step: int) -> bool:
        return self.small.due(step) or self.large.due(step)

    def attach(self, optimizers: Sequence[Optimizer]) -> Algorithm:
        return replace(self, small=self.small.attach(optimizers), large=self.large.attach(optimizers))
