"""Hierarchical: exact inside a machine, any relaxation between machines."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from gossamer.algorithms import cadence as cadences
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import NOTHING, Algorithm, Context, Subject, finishes, in_turn
from gossamer.algorithms.blocks.difference import computed
from gossamer.algorithms.blocks.node_groups import consecutive, leaders_of, machine, machines_of
from gossamer.algorithms.blocks.refusals import refuse_lag, refuse_momentum
from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.traits import Traits, joined
from gossamer.bucket_plan import is_buffer
from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow, Group, all_reduce, broadcast, within
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.pieces import part_of
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class Hierarchical(Algorithm, register=False):
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

    def __post_init__(self) -> None:
        for name in ("outer", "inner"):
            if not isinstance(getattr(self, name), Algorithm):
                raise ConfigurationError(f"{name} must be an instance of a gossamer algorithm; got {getattr(self, name)!r}")
        super().__post_init__()
        if self.inner.subject != "gradients":
            raise ConfigurationError(f"inner averages gradients; {type(self.inner).__name__} moves {self.inner.subject}")
        refuse_lag(self.outer, "Hierarchical")
        refuse_momentum(self.inner, "the inner part of Hierarchical")
        if isinstance(self.outer, Hierarchical):
            raise ConfigurationError("there are two levels: Hierarchical inside Hierarchical would be a third")
        if self.ranks_per_node is not None and not is_whole(self.ranks_per_node, 1):
            raise ConfigurationError(f"ranks_per_node must be a positive number; got {self.ranks_per_node!r}")

    def _fields(self) -> dict[str, Algorithm]:
        return {"inner": self.inner, "outer": self.outer}  # the last one says how long buckets are

    @cached_property
    def traits(self) -> Traits:
        """Of both; what it exchanges between nodes is what ``outer`` does."""
        outer, nodes = self.outer.traits, frozenset({self.ranks_per_node})
        both = joined([outer, self.inner.traits])
        return replace(both, subject=outer.subject, exact=False, takes_shares=False, prompt=False, nodes=nodes)

    @cached_property
    def cadence(self) -> Cadence:
        """That of ``outer``, among the nodes; gradients are averaged inside each in every step."""
        outer = self.outer.cadence
        beats = tuple(replace(beat, ranks_per_node=self.ranks_per_node) for beat in outer.beats)
        between = replace(outer, beats=beats)
        return between if self.subject == "weights" else cadences.joined([between, self.inner.cadence])

    def part(self, subject: Subject) -> Algorithm | None:
        outer = self.outer.part(subject)
        if outer is not None:
            return replace(self, outer=outer)
        if subject == "weights":
            return None
        return replace(self, outer=NOTHING, bucket_bytes=self.inner.bucket_bytes)

    def route(self, name: str, tensor: Tensor) -> Algorithm:
        handler = super().route(name, tensor)
        assert isinstance(handler, Hierarchical)
        if self.subject == "weights" and is_buffer(part_of(name)[0]):
            return OfOwn(**{field.name: getattr(handler, field.name) for field in fields(handler)})
        return handler

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        if self.ranks_per_node is not None:
            nodes = consecutive(world, self.ranks_per_node)
        if nodes is not None:
            self.outer.check(len(nodes))
            for size in set(map(len, nodes)):
                self.inner.check(size)

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        machines = machines_of(ctx, self.ranks_per_node)
        leaders, node = leaders_of(machines), machine(ctx, machines)
        if self.subject == "weights":
            return self._counted(flat, state, ctx)
        flat = self.inner.hand_over(flat, state.scoped(_INNER), inside(ctx, node))
        if any(True for _ in state.scoped(OUTER)):
            # A leader, or one that was a leader where the state was saved. What a leader sends counts for its whole machine.
            unsent = self.outer.hand_over(torch.zeros_like(wide(flat)), state.scoped(OUTER), inside(ctx, leaders))
            return wide(flat) + unsent * max(map(len, machines))
        return flat

    def _counted(self, weights: Tensor, state: State, ctx: Context) -> Tensor:
        """Machines count alike in the mean of weights, and so workers do not where some machines have more of them."""
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders = machine(ctx, machines), leaders_of(machines)
        if not self.outer.traits.weighted:
            share = ctx.world / (len(leaders) * len(node))
            return weights if share == 1 else weights * share
        if ctx.rank not in leaders:
            return torch.zeros_like(weights)  # a leader speaks for all of its machine
        counted = self.outer.hand_over(weights, state.scoped(OUTER), inside(ctx, leaders))
        return counted * (ctx.world / len(leaders))

    def put_back(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders = machine(ctx, machines), leaders_of(machines)
        if self.inner.put_back(mean, place, state.scoped(_INNER), inside(ctx, node)):
            return True  # so do all of this machine
        if ctx.rank in leaders:  # what it has not sent counts as often as there are workers on the largest machine
            share = mean * (len(node) / max(map(len, machines)))
            self.outer.put_back(share, place, state.scoped(OUTER), inside(ctx, leaders))
        return self.outer.traits.keeps_unsent

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return self.outer.message_dtype(dtype)

    def begin(self, bucket: Bucket, state: State, ctx: Context) -> None:
        leaders = leaders_of(machines_of(ctx, self.ranks_per_node))
        if ctx.rank in leaders:
            self.outer.begin(bucket, state.scoped(OUTER), inside(ctx, leaders))

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders, most = machine(ctx, machines), leaders_of(machines), max(map(len, machines))
        mean, dtype = bucket.flat, bucket.layout.dtype if self.subject == "weights" else bucket.flat.dtype
        # The mean over machines is the mean over workers only if all machines have as many.
        uneven = self.subject == "gradients" and most * len(leaders) != ctx.world
        if self.subject == "gradients":
            paid = bucket if ctx.rank in leaders else self._with_strays(bucket, state, inside(ctx, leaders), most)
            mean = yield from self._average_inside(paid, state, ctx, node)
            if not self.outer.cadence.due(ctx.step):
                return mean
            mean = mean * (len(node) / most) if uneven else mean
        if ctx.rank != node[0]:
            if self.subject == "weights":  # what leaders keep it may have from another number of ranks, and it would grow old
                state.scoped(OUTER).forget()
            return (yield from within(broadcast(torch.empty_like(bucket.flat, dtype=dtype)), node))
        flow = self.outer.exchange(bucket.holding(mean), state.scoped(OUTER), inside(ctx, leaders))
        result = computed((yield from within(flow, leaders)), dtype)
        result = result * (most * len(leaders) / ctx.world) if uneven else result
        return (yield from within(broadcast(result), node)) if len(node) > 1 else result

    def _average_inside(self, bucket: Bucket, state: State, ctx: Context, node: Group) -> Flow[Tensor]:
        """The mean over the workers of one machine."""
        if len(node) == 1:
            return bucket.flat.clone()
        mean: Tensor = yield from within(self.inner.exchange(bucket, state.scoped(_INNER), inside(ctx, node)), node)
        return mean

    def _with_strays(self, bucket: Bucket, state: State, ctx: Context, most: int) -> Bucket:
        """What a worker kept as the leader that it was, before a state was loaded by other workers, it sends as its own."""
        kept = state.scoped(OUTER)
        if not any(True for _ in kept):
            return bucket
        unsent = self.outer.hand_over(torch.zeros_like(wide(bucket.flat)), kept, ctx)
        kept.forget()
        return bucket.holding(bucket.flat + (unsent * most).to(bucket.flat.dtype))

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        if not finishes(self):
            return None
        machines = machines_of(ctx, self.ranks_per_node)
        node, leaders = machine(ctx, machines), leaders_of(machines)
        flows = []
        if self.subject == "gradients" and len(node) > 1:
            scoped = [each.scoped(_INNER) for each in states]
            flows.append((self.inner.finish(buckets, scoped, state.scoped(_INNER), inside(ctx, node)), node))
        if ctx.rank in leaders and self.outer.cadence.due(ctx.step):
            scoped = [each.scoped(OUTER) for each in states]
            flows.append((self.outer.finish(buckets, scoped, state.scoped(OUTER), inside(ctx, leaders)), leaders))
        # Of nothing, too: flows are numbered, on all workers alike.
        return in_turn([within(flow, group) for flow, group in flows if flow is not None])


OUTER, _INNER = "outer: ", "inner: "


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


def inside(ctx: Context, group: Group) -> Context:
    """What a flow among ``group`` may know; for a worker of it, or one that only asks what the others will do."""
    rank = group.index(ctx.rank) if ctx.rank in group else 0
    return replace(ctx, rank=rank, members=tuple(ctx.members[i] for i in group), nodes=None)
