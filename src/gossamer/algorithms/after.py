"""After: one algorithm for some steps, another one from there on."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from gossamer.algorithms import cadence as cadences
from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import NOTHING, Algorithm, Context, Nothing, keep_unsent, parts_of
from gossamer.algorithms.blocks.mean import mean_of
from gossamer.algorithms.blocks.refusals import check_parts
from gossamer.algorithms.cadence import Beat, Cadence
from gossamer.algorithms.traits import Traits, joined
from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State


def after(steps: int, then: Algorithm | None, *, before: Algorithm | None = None) -> Algorithm:
    """``before`` (exact all-reduce by default) for ``steps`` steps, ``then`` from there on.

    ``steps`` counts backward passes outside ``no_sync()``, as ``replica.step`` does.

    What ``before`` has not sent yet when it ends (a residual) is added to the first gradient that ``then`` communicates. If
    ``then`` moves weights, it is added to each worker's own gradient of that step, and travels in the weights; that of a
    parameter which nobody uses in that step is lost. Where replicas do not count alike in the mean that ``before`` keeps
    (:class:`PushSum`), the exchange at the change is one average of all of them, by what they count. One may move gradients
    and the other weights. Where ``then`` moves gradients, replicas stay as far apart as they are when it begins
    (``close(average=True)`` brings them together).
    """
    if not is_whole(steps, 0):
        raise ConfigurationError(f"after() takes a number of steps; got {steps!r}")
    return Phases(phases=((0, AllReduce() if before is None else before), (steps, NOTHING if then is None else then)))


def with_dense_start(algorithm: Algorithm) -> Algorithm:
    """``algorithm``, after the dense start that it asks for. Raises ConfigurationError where that takes all of a phase."""
    dense = algorithm.traits.dense
    if isinstance(algorithm, Phases) and dense and len(algorithm.phases) > 1 and algorithm.phases[1][0] <= dense:
        raise ConfigurationError(
            f"after({algorithm.phases[1][0]}, …): nothing is left of {algorithm.phases[0][1]!r}, which begins with {dense} "
            "dense steps: set its dense=, or let the next one begin later"
        )
    return after(dense, algorithm) if dense else algorithm


@dataclass(frozen=True, kw_only=True)
class Phases(Algorithm, register=False):
    """Algorithms that take each other's place: see :func:`after`. ``phases``: from which step on, and which one; the first from
    step 0 on. Of phases that are made of phases one list is made."""

    phases: tuple[tuple[int, Algorithm], ...]

    def __post_init__(self) -> None:
        check_parts(*(method for _, method in self.phases))
        object.__setattr__(self, "phases", tuple(_flat(self.phases)))
        there = parts_of(self)
        if there:
            object.__setattr__(self, "bucket_bytes", there[-1].bucket_bytes)
        super().__post_init__()
        if len({method.cadence.parts for method in there} - {1}) > 1:
            raise ConfigurationError("after(): both are in_parts(), of different numbers; weights are cut once")
        if self.cadence.late and any(method.cadence.ahead(start) for start, method in self.phases):
            raise ConfigurationError(
                "after(): one part has late=True, and then the averages of both are added after the update that ahead= foresees"
            )

    def _parts(self) -> tuple[Algorithm, ...]:
        return tuple(method for _, method in self.phases)

    def _with(self, change: Callable[[Algorithm], Algorithm]) -> "Phases":
        phases = tuple((start, change(method)) for start, method in self.phases)
        same = all(new is old for (_, new), (_, old) in zip(phases, self.phases, strict=True))
        return self if same else replace(self, phases=phases)

    @cached_property
    def traits(self) -> Traits:
        """Those of all phases; of several that say how many ranks share a node, the last one is right."""
        each = [method.traits for method in parts_of(self)] or [NOTHING.traits]
        nodes = next((one.nodes for one in reversed(each) if one.ranks_per_node), joined(each).nodes)
        dense = self.phases[0][1].traits.dense
        nodes |= {None} if any(None in one.nodes for one in each) else set()
        return replace(joined(each), exact=False, takes_shares=False, prompt=False, nodes=nodes, dense=dense)

    @cached_property
    def cadence(self) -> Cadence:
        """That of each phase in its time, and one exchange more where a phase takes over from one that keeps anything."""
        ends = [start for start, _ in self.phases[1:]] + [math.inf]
        each = [method.cadence.during(start, end) for (start, method), end in zip(self.phases, ends, strict=True)]
        changes = [
            Cadence((Beat(first=start, until=start + 1, once=True),))
            for (_, before), (start, then) in pairwise(self.phases)
            if self._takes_over(before) and (before.subject == "weights" or isinstance(then, Nothing))
        ]
        return cadences.joined([*each, *changes])

    @staticmethod
    def _takes_over(before: Algorithm) -> bool:
        if isinstance(before, Nothing):
            return False
        return before.subject == "gradients" or before.traits.weighted

    def _at(self, step: int) -> int:
        """The number of the phase that ``step`` is in."""
        return max(number for number, (start, _) in enumerate(self.phases) if start <= step)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        number = self._at(ctx.step)
        start, method = self.phases[number]
        before = self.phases[number - 1][1] if number else NOTHING
        if ctx.step == start and before.subject == "weights" and self._takes_over(before):
            return (yield from self._averaged(bucket, state, ctx, number - 1))
        handed = self._handed_over(bucket, state, ctx, number)
        if isinstance(method, Nothing):
            return handed.flat.to(bucket.flat.dtype)
        result = yield from method.exchange(handed, state.scoped(_scope(number)), ctx)
        return result.to(bucket.flat.dtype) if self.subject == "gradients" else result

    def _averaged(self, bucket: Bucket, state: State, ctx: Context, number: int) -> Flow[Tensor]:
        """In place of an exchange of weights: all go on from their mean, each with what it counted in phase ``number``."""
        weights, kept = wide(bucket.flat), state.scoped(_scope(number))
        mean = yield from mean_of(bucket, self.phases[number][1].hand_over(weights, kept, ctx), ctx)
        kept.forget()
        return torch.sub(mean, weights, out=mean).to(bucket.flat.dtype)

    def _handed_over(self, bucket: Bucket, state: State, ctx: Context, number: int) -> Bucket:
        """The bucket, with what phases before this one have not sent of gradients; from then on that is forgotten."""
        before = [(_scope(n), m) for n, (_, m) in enumerate(self.phases[:number]) if m.subject == "gradients" and m != NOTHING]
        if not before:
            return bucket
        # In full precision on every worker, whether anything is kept or not: messages must be of one type.
        flat = given = wide(bucket.flat) if ctx.step == self.phases[number][0] else bucket.flat
        for scope, method in before:
            kept = state.scoped(scope)
            flat = method.hand_over(flat, kept, ctx)
            kept.forget()
        again = state.get(RESIDUAL)
        state.scoped(RESIDUAL).forget()
        flat = (flat if again is None else flat + again).to(given.dtype)
        return bucket if flat is bucket.flat else bucket.holding(flat)

    def begin(self, bucket: Bucket, state: State, ctx: Context) -> None:
        self.phases[0][1].begin(bucket, state.scoped(_scope(0)), ctx)

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        number = self._at(ctx.step)
        scope = _scope(number)
        return self.phases[number][1].finish(buckets, [s.scoped(scope) for s in states], state.scoped(scope), ctx)

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        now = self._at(ctx.step)
        for number, (_, method) in enumerate(self.phases):
            if number == now or method.subject == "gradients":
                flat = method.hand_over(flat, state.scoped(_scope(number)), ctx)
        again = state.get(RESIDUAL)
        return flat if again is None else wide(flat) + again

    def put_back(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        number = self._at(ctx.step)
        method = self.phases[number][1]
        if method.put_back(mean, place, state.scoped(_scope(number)), ctx):
            return True
        # What was handed over was not used: it is handed over again. All workers know alike whether it was.
        if not self._may_have_handed_over(number, state, ctx.step):
            return False
        if state.written(RESIDUAL) is None:
            state[RESIDUAL] = torch.zeros_like(wide(state[RESIDUAL]))
        return keep_unsent(mean, place, state, ctx)

    def _may_have_handed_over(self, number: int, state: State, step: int) -> bool:
        """Whether this exchange may have had something in it that an earlier phase had not sent."""
        if not number or isinstance(self.phases[number][1], Nothing):
            return False
        kept = any(method.traits.keeps_unsent for _, method in self.phases[:number])
        return (step == self.phases[number][0] and kept) or state.touched(RESIDUAL)


def _scope(number: int) -> str:
    return f"phase {number}: "


def _flat(phases: Sequence[tuple[int, Algorithm]]) -> Iterator[tuple[int, Algorithm]]:
    """The same with the phases of phases among them, and without phases that never begin."""
    ends = [start for start, _ in phases[1:]] + [math.inf]
    for (first, method), end in zip(phases, ends, strict=True):
        inner = method.phases if isinstance(method, Phases) else ((0, method),)
        until = [start for start, _ in inner[1:]] + [math.inf]
        for (start, each), last in zip(inner, until, strict=True):
            if max(first, start) < min(end, last):
                yield max(first, start), each
