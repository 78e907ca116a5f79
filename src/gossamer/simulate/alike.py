"""Alike: exchanges of one step that do the same. One of them is carried out, and the others follow what it has done.

On ``meta`` tensors there are no values, so what an exchange does depends on its algorithm, the step, the shapes in its bucket,
and what is kept of it, as long as that is on ``meta``, too. The numbers of buckets and the names of parameters are for seeds,
and for what is kept. A large model has the same layer many times: predicting GPT-2 XL with ``ScatterReduce`` among 4,096
workers takes a fourth of the time.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context
from gossamer.algorithms.blocks.difference import Difference
from gossamer.buckets import Bucket
from gossamer.comm.ops import Command, Decide, Flow, Start, Wait
from gossamer.simulate.processor import Processing
from gossamer.state import State

T = TypeVar("T")

OWN = "gossamer."
"""Where algorithms are defined of which that is known; one of the user's may look at anything."""


class Ended(Wait):
    """Wait for a started operation whose result nobody looks at."""


@dataclass(slots=True)
class Script:
    """What an exchange has done: before each command, and before its end, the seconds of a processor that it asked for;
    operations to start, and the numbers of those to wait for; what it has kept; and what it gave."""

    whole: bool = True
    """Whether another exchange can do the same."""
    asked: list[float] = field(default_factory=list)
    commands: list[Start | int] = field(default_factory=list)
    flats: dict[str, Tensor | None] = field(default_factory=dict)
    extras: dict[tuple[str, int | str], Tensor | None] = field(default_factory=dict)
    given: bool = False
    again: Callable[[Tensor], Any] = lambda flat: flat
    """What another exchange gives, whose bucket has this tensor."""


class AlikeExchanges:
    """Gives the flows of exchanges."""

    def __init__(self, processing: Processing) -> None:
        self._processing = processing
        self._scripts: dict[Any, Script] = {}
        self._numbers: dict[int, tuple[Algorithm, int | None]] = {}
        """By its id an algorithm, and the number of those that are equal; None: it may look at anything."""
        self._known: list[Algorithm] = []

    def flow(self, exchange: Callable[..., Flow[Any]], bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        """The flow of an exchange, or one that does the same."""
        number = self._number(exchange)
        if number is None or not _is_clean(state):
            return (yield from exchange(bucket, state, ctx))
        shapes = tuple((segment.offset, segment.shape, segment.stride) for segment in bucket.segments)
        key = number, ctx.step, ctx.samples, bucket.flat.dtype, bucket.holds_shares, shapes, _kept(state, bucket)
        script = self._scripts.get(key)
        if script is not None:
            return (yield from self._follow(script, bucket, state))
        script = Script()
        result = yield from self._noted(exchange(bucket, state, ctx), script, bucket, state)
        if script.whole:
            self._scripts[key] = script
        return result

    def _number(self, exchange: Callable[..., Flow[Any]]) -> int | None:
        handler = getattr(exchange, "__self__", None)
        if not isinstance(handler, Algorithm):
            return None
        if id(handler) not in self._numbers:
            if not _is_own(handler):
                number = None
            elif handler in self._known:
                number = self._known.index(handler)
            else:
                number = len(self._known)
                self._known.append(handler)
            self._numbers[id(handler)] = handler, number
        return self._numbers[id(handler)][1]

    def _noted(self, flow: Flow[Any], script: Script, bucket: Bucket, state: State) -> Flow[Any]:
        """Carry a flow out, and note what it does."""
        started: list[Any] = []
        reply: Any = None
        while True:
            try:
                command: Command = flow.send(reply)
            except StopIteration as stop:
                script.asked.append(self._processing.asked)
                _note(script, stop.value, bucket, state)
                return stop.value
            asked = self._processing.asked
            reply = yield command
            if isinstance(command, Decide):
                script.whole = script.whole and not asked
                continue
            script.asked.append(asked)
            if isinstance(command, Start):
                script.commands.append(command)
                started.append(reply)
            else:
                script.commands.append(next(place for place, each in enumerate(started) if each is command.handle))

    def _follow(self, script: Script, bucket: Bucket, state: State) -> Flow[Any]:
        """Do what another exchange has done."""
        started: list[Any] = []
        for asked, command in zip(script.asked, script.commands, strict=False):
            if asked:
                self._processing.ask(asked)
            if isinstance(command, int):
                yield Ended(started[command])
            else:
                started.append((yield command))
        self._processing.ask(script.asked[-1])
        names = bucket.layout.names
        if script.flats:
            state.flats.write(script.flats)
        if script.extras:
            state.extras.write(
                {(key, owner if isinstance(owner, str) else names[owner]): each for (key, owner), each in script.extras.items()}
            )
        flat = bucket.flat
        if script.given:
            bucket.give()
        return script.again(flat)


def _is_own(algorithm: Algorithm) -> bool:
    """Whether it is one of gossamer's, and all that it is made of or averages by."""
    held = [value for value in vars(algorithm).values() if isinstance(value, Algorithm)]
    return type(algorithm).__module__.startswith(OWN) and all(map(_is_own, held))


def _is_clean(state: State) -> bool:
    """Whether nothing was written since the last commit, and nothing that is kept has values."""
    if state.flats.draft or state.extras.draft:
        return False
    return all(each.is_meta for kept in (state.flats.kept, state.extras.kept) for each in kept.values())


def _kept(state: State, bucket: Bucket) -> Any:
    """What an exchange may find in its state."""
    flats = tuple((name, each.dtype) for name, each in state.flats.kept.items())
    extras = _by_place(state.extras.kept, bucket) if state.extras.kept else {}
    return flats, tuple((key, each.shape, each.dtype) for key, each in extras.items())


def _by_place(extras: Mapping[tuple[str, str], T], bucket: Bucket) -> dict[tuple[str, int | str], T]:
    """Extras by the places of parameters in the bucket in place of their names."""
    places = {name: place for place, name in enumerate(bucket.layout.names)}
    return {(key, places.get(owner, owner)): each for (key, owner), each in extras.items()}


def _note(script: Script, result: Any, bucket: Bucket, state: State) -> None:
    """Note what an exchange has left behind, and what it gave."""
    script.flats, script.extras = dict(state.flats.draft), _by_place(state.extras.draft, bucket)
    written = (*script.flats.values(), *script.extras.values())
    script.whole = script.whole and all(each is None or each.is_meta for each in written)
    script.given, flat = bucket._given, bucket.flat
    tensors = result.theirs if isinstance(result, Difference) else [result]
    own = [tensor is flat for tensor in tensors]
    shapes = [torch.empty_like(tensor) for tensor in tensors]

    def again(other: Tensor) -> Any:
        found = [other if is_own else torch.empty_like(like) for is_own, like in zip(own, shapes, strict=True)]
        if not isinstance(result, Difference):
            return found[0]
        mine = result.mine
        return replace(result, mine=mine if mine is None else other if mine is flat else torch.empty_like(mine), theirs=found)

    script.again = again
