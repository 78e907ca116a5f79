"""Schedule: which algorithm when, and which for what: combinations that are algorithms themselves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context, Subject
from gossamer.algorithms.combination import Combination, refuse_lag
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.state import State


def after(steps: int, then: Algorithm, *, before: Algorithm | None = None) -> Algorithm:
    """``before`` (exact all-reduce by default) for ``steps`` steps, ``then`` from there on.

    What ``before`` still owes when it ends (a residual) is dropped. One may move gradients and the other weights.
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
        if not isinstance(self.steps, int) or self.steps < 0:
            raise ConfigurationError(f"after() takes a number of steps; got {self.steps!r}")
        _check_algorithms(self.then, self.before)

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return tuple(part for part in (self.before, self.then) if part is not None)

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """Weights, as soon as one of the parts moves them."""
        return "weights" if any(part.subject == "weights" for part in self.parts) else "gradients"

    @property
    def exchanges_history(self) -> bool:
        return any(part.exchanges_history for part in self.parts)

    @property
    def lands_late(self) -> bool:
        return any(part.lands_late for part in self.parts)

    def at(self, step: int) -> Algorithm | None:
        """The part whose time it is."""
        return self.before if step < self.steps else self.then

    def due(self, step: int) -> bool:
        part = self.at(step)
        return part is not None and part.due(step)

    def part(self, subject: Subject) -> Algorithm | None:
        before, then = (None if a is None else a.part(subject) for a in (self.before, self.then))
        if before is None and then is None:
            return None
        sizes = [a.bucket_bytes for a in (then, before) if a is not None]
        return replace(self, before=before, then=then, bucket_bytes=sizes[0])

    def route(self, name: str, tensor: Tensor) -> str:
        return _SEPARATOR.join("" if a is None else a.route(name, tensor) for a in (self.before, self.then))

    def of(self, label: str) -> Algorithm:
        before, _, then = label.partition(_SEPARATOR)
        return replace(
            self,
            before=None if self.before is None else self.before.of(before),
            then=None if self.then is None else self.then.of(then),
        )

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        part = self.at(ctx.step)
        assert part is not None, "not due"
        return (yield from part.exchange(bucket, state.scoped(self._scope(ctx.step)), ctx))

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        part, scope = self.at(ctx.step), self._scope(ctx.step)
        return None if part is None else part.finish(buckets, [s.scoped(scope) for s in states], state.scoped(scope), ctx)

    def _scope(self, step: int) -> str:
        return "before: " if step < self.steps else "then: "

    def attach(self, optimizers: Sequence[Optimizer]) -> Algorithm:
        before, then = (None if a is None else a.attach(optimizers) for a in (self.before, self.then))
        return replace(self, before=before, then=then)

    def detach(self, optimizers: Sequence[Optimizer]) -> None:
        for part in self.parts:
            part.detach(optimizers)

    def check(self, world: int) -> None:
        for part in self.parts:
            part.check(world)


_SEPARATOR = "|"


@dataclass(frozen=True, kw_only=True)
class BySize(Combination, register=False):
    """See :func:`by_size`."""

    threshold: int
    small: Algorithm
    large: Algorithm

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_algorithms(self.small, self.large)
        if not isinstance(self.threshold, int) or self.threshold < 0:
            raise ConfigurationError(f"by_size() takes a number of bytes; got {self.threshold!r}")
        if self.small.subject != self.large.subject:
            raise ConfigurationError(
                f"by_size(): {type(self.small).__name__} moves {self.small.subject}, {type(self.large).__name__} moves "
                f"{self.large.subject}; both must move the same"
            )
        for part in self.parts:
            if part.subject == "weights" and part.part("gradients") is not None:
                raise ConfigurationError(
                    f"by_size() takes what moves weights alone; {part!r} moves gradients as well: "
                    "write after(…, by_size(…)), or Hierarchical(by_size(…))"
                )
        for name in ("exchanges_history", "lands_late"):
            if getattr(self.small, name) != getattr(self.large, name):
                raise ConfigurationError(f"by_size(): both parts must have the same history= and late=; got {self!r}")

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return self.small, self.large

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """That of both."""
        return self.small.subject

    @property
    def exchanges_history(self) -> bool:
        return self.large.exchanges_history

    @property
    def lands_late(self) -> bool:
        return self.large.lands_late

    def route(self, name: str, tensor: Tensor) -> str:
        which = "small" if tensor.numel() * tensor.element_size() < self.threshold else "large"
        part = self.small if which == "small" else self.large
        return f"{which}:{part.route(name, tensor)}"

    def of(self, label: str) -> Algorithm:
        which, _, inner = label.partition(":")
        return (self.small if which == "small" else self.large).of(inner)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        part = self.small if bucket.layout.nbytes < self.threshold else self.large
        return (yield from part.exchange(bucket, state, ctx))

    def due(self, step: int) -> bool:
        return self.small.due(step) or self.large.due(step)

    def attach(self, optimizers: Sequence[Optimizer]) -> Algorithm:
        return replace(self, small=self.small.attach(optimizers), large=self.large.attach(optimizers))

    def detach(self, optimizers: Sequence[Optimizer]) -> None:
        self.small.detach(optimizers)
        self.large.detach(optimizers)

    def check(self, world: int) -> None:
        self.small.check(world)
        self.large.check(world)


def _check_algorithms(*parts: Algorithm | None) -> None:
    for part in parts:
        if part is not None and not isinstance(part, Algorithm):
            raise ConfigurationError(f"after() and by_size() combine instances of gossamer algorithms; got {part!r}")
        if part is not None:
            refuse_lag(part, "after() and by_size()")
