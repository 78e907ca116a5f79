"""Hierarchical: exact inside a machine, any relaxation between machines."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm, Context, Subject
from gossamer.algorithms.combination import Combination, joined, refuse_lag, refuse_momentum, split, total
from gossamer.algorithms.difference import computed
from gossamer.buckets import Bucket, Segment, is_buffer
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow, Group, all_reduce, broadcast, within
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.pieces import part_of
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Combination, register=False):
    """``Hierarchical(outer)``: workers of one machine average among themselves; one of them speaks for all to the others.

    ``inner`` averages the gradients inside each machine, every step. Then the first worker of each runs ``outer`` with
    the first workers of the other machines, and its result is broadcast inside the machine. Where ``outer`` moves weights, that
    happens between two steps, and the workers of one machine stay bit-identical; machines then count alike, however many
    workers each has. Buffers that travel with the weights are averaged inside the machine first: they are each worker's own.

    Which ranks share a machine is known from the launcher (torchrun's ``GROUP_RANK``, else the host's name);
    ``ranks_per_node`` says it instead: consecutive ranks. So does a ``DeviceMesh`` of two dimensions, machines and the
    workers of each, given to :func:`gossamer.replicate` (``mesh=``).

    Between machines: the bytes and messages of ``outer`` among as many workers as there are machines. ``bucket_bytes``: as
    ``outer`` has it, unless given. Where ``outer`` moves weights, gradients have buckets of their own, as ``inner`` has them.

    Not the choice where each machine has one worker: then it is ``outer``.

    Source: Gan et al. 2021 (arXiv 2107.01499), hierarchical communication.
    """

    outer: Algorithm = field(default_factory=AllReduce, kw_only=False)
    inner: Algorithm = field(default_factory=AllReduce)
    ranks_per_node: int | None = None
    bucket_bytes: int = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name in ("outer", "inner"):
            if not isinstance(getattr(self, name), Algorithm):
                raise ConfigurationError(f"{name} must be an instance of a gossamer algorithm; got {getattr(self, name)!r}")
        if self.bucket_bytes is None:
            self.fuse_as(self.outer)
        super().__post_init__()
        if self.inner.subject != "gradients":
            raise ConfigurationError(f"inner averages gradients; {type(self.inner).__name__} moves {self.inner.subject}")
        refuse_lag(self.outer, "Hierarchical")
        refuse_momentum(self.inner, "the inner part of Hierarchical")
        if isinstance(self.outer, Hierarchical):
            raise ConfigurationError("there are two levels: Hierarchical inside Hierarchical would be a third")
        if self.ranks_per_node is not None and not is_whole(self.ranks_per_node, 1):
            raise ConfigurationError(f"ranks_per_node must be a positive number; got {self.ranks_per_node!r}")

    @property
    def parts(self) -> tuple[Algorithm, ...]:
        return self.outer, self.inner

    @property
    def subject(self) -> Subject:  # type: ignore[override]
        """That of ``outer``."""
        return self.outer.subject

    @property
    def asks_for_machines(self) -> bool:
        return self.ranks_per_node is None

    @property
    def workers_per_machine(self) -> int | None:
        return self.ranks_per_node

    @property
    def by_machine(self) -> bool:
        return True

    @property
    def exchanges_history(self) -> bool:
        return self.outer.exchanges_history

    @property
    def weight_parts(self) -> int:
        return self.outer.weight_parts

    @property
    def lands_late(self) -> bool:
        return self.outer.lands_late

    def traffic_cycle(self, world: int, machines: int) -> int:
        leaders = machines if self.ranks_per_node is None else -(-world // self.ranks_per_node)
        return math.lcm(self.inner.traffic_cycle(-(-world // leaders), 1), self.outer.traffic_cycle(leaders, leaders))

    def gradients_apart(self, ctx: Context) -> int:
        return self.outer.gradients_apart(inside(ctx, leaders_of(machines_of(ctx, self.ranks_per_node))))

    def part(self, subject: Subject) -> Algorithm | None:
        outer = self.outer.part(subject)
        if outer is not None:
            return replace(self, outer=outer)
        if subject == "weights":
            return None
        return Inside(inner=self.inner, ranks_per_node=self.ranks_per_node, bucket_bytes=self.inner.bucket_bytes)

    def overtaking(self) -> "Hierarchical":
        return replace(self, outer=self.outer.overtaking(), inner=self.inner.overtaking())

    def due(self, step: int) -> bool:
        """Gradients are averaged inside the machine in every step."""
        return self.subject == "gradients" or self.outer.due(step)

    def route(self, name: str, tensor: Tensor) -> str:
        label = joined(self.outer.route(name, tensor), self.inner.route(name, tensor))
        return _OWN + label if self.subject == "weights" and is_buffer(part_of(name)[0]) else label

    def of(self, label: str) -> Algorithm:
        outer, inner = split(label.removeprefix(_OWN))
        kind = OfOwn if label.startswith(_OWN) else Hierarchical
        return kind(
            outer=self.outer.of(outer),
            inner=self.inner.of(inner),
            ranks_per_node=self.ranks_per_node,
            bucket_bytes=self.bucket_bytes,
        )

    def attach(self, optimizers: Sequence[Optimizer]) -> Algorithm:
        return replace(self, outer=self.outer.attach(optimizers), inner=self.inner.attach(optimizers))

    def check(self, world: int) -> None:
        if self.ranks_per_node is not None:
            self._check(consecutive(world, self.ranks_per_node))

    def check_machines(self, machines: Sequence[Group]) -> None:
        if self.ranks_per_node is None:
            self._check(machines)

    def _check(self, machines: Iterable[Group]) -> None:
        sizes = [len(machine) for machine in machines]
        self.outer.check(len(sizes))
        for size in set(sizes):
            self.inner.check(size)

    def owed(self, state: State, ctx: Context) -> Tensor | None:
        machines = machines_of(ctx, self.ranks_per_node)
        leaders, node = leaders_of(machines), machine(ctx, machines)
        # What a leader sends counts for its whole machine.
        outer = self.outer.owed(state.scoped(OUTER), inside(ctx, leaders)) if ctx.rank in leaders else None
        inner = self.inner.owed(state.scoped(_INNER), inside(ctx, node))
        return total([None if outer is None else wide(outer) * max(map(len, machines)), inner])

    def owe(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders = machine(ctx, machines), leaders_of(machines)
        if self.inner.owe(mean, place, state.scoped(_INNER), inside(ctx, node)):
            return True  # so do all of this machine
        if ctx.rank in leaders:  # what it owes counts as often as there are workers on the largest machine
            share = mean * (len(node) / max(map(len, machines)))
            self.outer.owe(share, place, state.scoped(OUTER), inside(ctx, leaders))
        return self.outer.keeps_back

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.outer.message_dtype(dtype)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders, most = machine(ctx, machines), leaders_of(machines), max(map(len, machines))
        mean, dtype = bucket.flat, bucket.layout.dtype if self.subject == "weights" else bucket.flat.dtype
        # The mean over machines is the mean over workers only if all machines have as many.
        uneven = self.subject == "gradients" and most * len(leaders) != ctx.world
        if self.subject == "gradients":
            paid = bucket if ctx.rank in leaders else self._with_strays(bucket, state, inside(ctx, leaders), most)
            mean = yield from average_inside(self.inner, paid, state, ctx, node)
            if not self.outer.due(ctx.step):
                return mean
            mean = mean * (len(node) / most) if uneven else mean
            state.withdraw(mean)  # finite or not on this machine, the mean over all of them may be written there
        if ctx.rank != node[0]:
            return (yield from within(broadcast(torch.empty_like(bucket.flat, dtype=dtype)), node))
        flow = self.outer.exchange(bucket.holding(mean), state.scoped(OUTER), inside(ctx, leaders))
        result = computed((yield from within(flow, leaders)), dtype)
        result = result * (most * len(leaders) / ctx.world) if uneven else result
        return (yield from within(broadcast(result), node)) if len(node) > 1 else result

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        """Where weights travel machines count alike, and so workers do not where some machines have more of them."""
        return self.subject == "weights" or super().weighs

    def counted(self, weights: Tensor, state: State, ctx: Context) -> Tensor:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders = machine(ctx, machines), leaders_of(machines)
        if not self.outer.weighs:
            share = ctx.world / (len(leaders) * len(node))
            return weights if share == 1 else weights * share
        if ctx.rank not in leaders:
            return torch.zeros_like(weights)  # a leader speaks for all of its machine
        counted = self.outer.counted(weights, state.scoped(OUTER), inside(ctx, leaders))
        return counted * (ctx.world / len(leaders))

    def _with_strays(self, bucket: Bucket, state: State, ctx: Context, most: int) -> Bucket:
        """What a worker owes as the leader that it was, before a state was loaded by other workers, it sends as its own."""
        owed = self.outer.owed(state.scoped(OUTER), ctx)
        state.scoped(OUTER).forget()
        if owed is None:
            return bucket
        return bucket.holding(bucket.flat + (wide(owed) * most).to(bucket.flat.dtype))

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders = machine(ctx, machines), leaders_of(machines)
        inner = finish_inside(self.inner, buckets, states, state, ctx, node) if self.subject == "gradients" else None
        outer = None
        if ctx.rank in leaders and self.outer.due(ctx.step):
            scoped = [each.scoped(OUTER) for each in states]
            outer = self.outer.finish(buckets, scoped, state.scoped(OUTER), inside(ctx, leaders))
        flows = [flow for flow in (inner, None if outer is None else within(outer, leaders)) if flow is not None]
        return in_turn(flows)  # of nothing, too: flows are numbered, on all workers alike


OUTER, _INNER = "outer: ", "inner: "

_OWN = "own: "
"""Marks the labels of what every worker has of its own, and not in common with those of its machine: buffers."""


@dataclass(frozen=True, kw_only=True)
class OfOwn(Hierarchical, register=False):
    """A hierarchy over weights for what the workers of a machine do not have in common: they take their mean between them."""

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype  # they are averaged first

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders, own = machine(ctx, machines), leaders_of(machines), wide(bucket.flat).clone()
        value = own if len(node) == 1 else (yield from within(all_reduce(own / len(node)), node))
        if ctx.rank == node[0]:
            mean = value.to(bucket.flat.dtype)
            flow = self.outer.exchange(bucket.holding(mean.clone()), state.scoped(OUTER), inside(ctx, leaders))
            value = wide(mean + computed((yield from within(flow, leaders)), mean.dtype))
        if len(node) > 1:
            value = yield from within(broadcast(value), node)
        return (value - own).to(bucket.flat.dtype)


@dataclass(frozen=True, kw_only=True)
class Inside(Algorithm, register=False):
    """The gradients' part of a hierarchy whose machines exchange weights: the mean inside the machine."""

    inner: Algorithm
    ranks_per_node: int | None

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        node = machine(ctx, machines_of(ctx, self.ranks_per_node))
        return (yield from average_inside(self.inner, bucket, state, ctx, node))

    @property
    def finishes(self) -> bool:
        return self.inner.finishes

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        return finish_inside(self.inner, buckets, states, state, ctx, machine(ctx, machines_of(ctx, self.ranks_per_node)))

    def route(self, name: str, tensor: Tensor) -> str:
        return self.inner.route(name, tensor)

    def of(self, label: str) -> Algorithm:
        return replace(self, inner=self.inner.of(label))

    def overtaking(self) -> "Inside":
        return replace(self, inner=self.inner.overtaking())

    def owed(self, state: State, ctx: Context) -> Tensor | None:
        return self.inner.owed(state.scoped(_INNER), ctx)

    @property
    def keeps_back(self) -> bool:
        return self.inner.keeps_back

    def owe(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        node = machine(ctx, machines_of(ctx, self.ranks_per_node))
        return self.inner.owe(mean, place, state.scoped(_INNER), inside(ctx, node))


def average_inside(inner: Algorithm, bucket: Bucket, state: State, ctx: Context, node: Group) -> Flow[Tensor]:
    """The mean over the workers of one machine."""
    if len(node) == 1:
        return bucket.flat.clone()
    mean: Tensor = yield from within(inner.exchange(bucket, state.scoped(_INNER), inside(ctx, node)), node)
    return mean


def finish_inside(
    inner: Algorithm, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context, node: Group
) -> Flow[None] | None:
    """What ``inner`` does once per step, among the workers of one machine; None for nothing, on all machines."""
    if len(node) == 1:
        return in_turn([])
    flow = inner.finish(buckets, [each.scoped(_INNER) for each in states], state.scoped(_INNER), inside(ctx, node))
    return None if flow is None else within(flow, node)


def in_turn(flows: Iterable[Flow[None]]) -> Flow[None]:
    """One flow after the other."""
    for flow in flows:
        yield from flow


def machines_of(ctx: Context, ranks_per_node: int | None) -> tuple[Group, ...]:
    """The workers of each machine."""
    if ranks_per_node is None:
        return ctx.machines
    return consecutive(ctx.world, ranks_per_node)


def consecutive(world: int, ranks_per_node: int) -> tuple[Group, ...]:
    """Machines of so many ranks each, one after the other."""
    return tuple(tuple(range(world))[first : first + ranks_per_node] for first in range(0, world, ranks_per_node))


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
