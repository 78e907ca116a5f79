"""Hierarchical: exact inside a machine, any relaxation between machines."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context, Subject
from gossamer.algorithms.combination import Combination, refuse_lag
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow, Group, broadcast, within
from gossamer.errors import ConfigurationError
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Combination, register=False):
    """``Hierarchical(outer)``: workers of one machine average among themselves; one of them speaks for all to the others.

    ``inner`` averages the gradients inside each machine, every step. Then the first worker of each runs ``outer`` with
    the first workers of the other machines, and its result is broadcast inside the machine. Where ``outer`` moves weights, that
    happens between two steps, and the workers of one machine stay bit-identical; machines then count alike, however many
    workers each has.

    Which ranks share a machine is known from the launcher (torchrun's ``GROUP_RANK``, else the host's name);
    ``ranks_per_node`` says it instead: consecutive ranks.

    Between machines: the bytes and messages of ``outer`` among as many workers as there are machines.

    Not the choice where each machine has one worker: then it is ``outer``.

    Source: Gan et al. 2021 (arXiv 2107.01499), hierarchical communication.
    """

    outer: Algorithm = field(default_factory=AllReduce, kw_only=False)
    inner: Algorithm = field(default_factory=AllReduce)
    ranks_per_node: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("outer", "inner"):
            if not isinstance(getattr(self, name), Algorithm):
                raise ConfigurationError(f"{name} must be an instance of a gossamer algorithm; got {getattr(self, name)!r}")
        if self.inner.subject != "gradients":
            raise ConfigurationError(f"inner averages gradients; {type(self.inner).__name__} moves {self.inner.subject}")
        refuse_lag(self.outer, "Hierarchical")
        if isinstance(self.outer, Hierarchical):
            raise ConfigurationError("there are two levels: Hierarchical inside Hierarchical would be a third")
        if self.ranks_per_node is not None and (not isinstance(self.ranks_per_node, int) or self.ranks_per_node < 1):
            raise ConfigurationError(f"ranks_per_node must be a positive number; got {self.ranks_per_node!r}")

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return self.outer, self.inner

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """That of ``outer``."""
        return self.outer.subject

    @property
    def exchanges_history(self) -> bool:
        return self.outer.exchanges_history

    @property
    def lands_late(self) -> bool:
        return self.outer.lands_late

    def part(self, subject: Subject) -> Algorithm | None:
        outer = self.outer.part(subject)
        if outer is not None:
            return replace(self, outer=outer)
        return Inside(inner=self.inner, ranks_per_node=self.ranks_per_node) if subject == "gradients" else None

    def due(self, step: int) -> bool:
        # Gradients are averaged inside every machine in every step: its workers stay equal.
        return self.subject == "gradients" or self.outer.due(step)

    def route(self, name: str, tensor: Tensor) -> str:
        return self.outer.route(name, tensor)

    def of(self, label: str) -> Algorithm:
        return replace(self, outer=self.outer.of(label))

    def attach(self, optimizers: Sequence[Optimizer]) -> Algorithm:
        return replace(self, outer=self.outer.attach(optimizers))

    def detach(self, optimizers: Sequence[Optimizer]) -> None:
        self.outer.detach(optimizers)

    def check(self, world: int) -> None:
        if self.ranks_per_node is not None:
            self._check(tuple(range(world))[i : i + self.ranks_per_node] for i in range(0, world, self.ranks_per_node))

    def check_machines(self, machines: Sequence[Group]) -> None:
        if self.ranks_per_node is None:
            self._check(machines)

    def _check(self, machines: Iterable[Group]) -> None:
        sizes = [len(machine) for machine in machines]
        self.outer.check(len(sizes))
        for size in set(sizes):
            self.inner.check(size)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders, most = machine(ctx, machines), leaders_of(machines), max(map(len, machines))
        mean = bucket.flat
        if not self.outer.due(ctx.step):
            return (yield from average_inside(self.inner, bucket, state, ctx, node))
        # The mean over machines is the mean over workers only if all machines have as many.
        uneven = self.subject == "gradients" and most * len(leaders) != ctx.world
        if self.subject == "gradients":
            mean = yield from average_inside(self.inner, bucket, state, ctx, node)
            mean = mean * (len(node) / most) if uneven else mean
        if ctx.rank != node[0]:
            return (yield from within(broadcast(torch.empty_like(bucket.flat)), node))
        flow = self.outer.exchange(bucket.holding(mean), state.scoped(_OUTER), inside(ctx, leaders))
        result = yield from within(flow, leaders)
        result = result * (most * len(leaders) / ctx.world) if uneven else result
        return (yield from within(broadcast(result), node)) if len(node) > 1 else result

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        leaders = leaders_of(machines_of(ctx, self.ranks_per_node))
        scoped = [each.scoped(_OUTER) for each in states]
        flow = self.outer.finish(buckets, scoped, state.scoped(_OUTER), inside(ctx, leaders)) if ctx.rank in leaders else None
        return within(flow, leaders) if flow is not None else _nothing()


_OUTER, _INNER = "outer: ", "inner: "


@dataclass(frozen=True, kw_only=True)
class Inside(Algorithm, register=False):
    """The gradients' part of a hierarchy whose machines exchange weights: the mean inside the machine."""

    inner: Algorithm
    ranks_per_node: int | None

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        node = machine(ctx, machines_of(ctx, self.ranks_per_node))
        return (yield from average_inside(self.inner, bucket, state, ctx, node))


def average_inside(inner: Algorithm, bucket: Bucket, state: State, ctx: Context, node: Group) -> Flow[Tensor]:
    """The mean over the workers of one machine."""
    if len(node) == 1:
        return bucket.flat.clone()
    return (yield from within(inner.exchange(bucket, state.scoped(_INNER), inside(ctx, node)), node))


def machines_of(ctx: Context, ranks_per_node: int | None) -> tuple[Group, ...]:
    """The workers of each machine."""
    if ranks_per_node is None:
        return ctx.machines
    return tuple(tuple(range(ctx.world))[first : first + ranks_per_node] for first in range(0, ctx.world, ranks_per_node))


def machine(ctx: Context, machines: Sequence[Group]) -> Group:
    """The workers of this worker's machine."""
    return next(group for group in machines if ctx.rank in group)


def leaders_of(machines: Sequence[Group]) -> Group:
    """The first worker of each machine."""
    return tuple(sorted(group[0] for group in machines))


def inside(ctx: Context, group: Group) -> Context:
    """What a flow among ``group`` may know; for a worker of it, or one that only asks what the others will do."""
    rank = group.index(ctx.rank) if ctx.rank in group else 0
    return Context(ctx.step, rank, tuple(ctx.members[i] for i in group))


def _nothing() -> Flow[None]:
    yield from ()
