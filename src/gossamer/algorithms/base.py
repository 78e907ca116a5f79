"""Algorithm: one relaxation of the exchange, written as a generator that never touches the network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor

from gossamer.algorithms import cadence as cadences
from gossamer.algorithms import traits as what
from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.traits import Subject as Subject
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.codecs.residual import add_to
from gossamer.comm.ops import Context as Context
from gossamer.comm.ops import Flow, Group
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import RESIDUAL, State

_REGISTRY: dict[str, type["Algorithm"]] = {}


class _Usual(int):
    """A number of bytes that nobody has chosen."""


USUAL = _Usual(2 * 2**20)

CHANGEABLE = "changeable"


def changeable(default: Any) -> Any:
    """A dataclass field with this default; a run that goes on from a saved state may give it another value, and what is kept
    keeps its meaning."""
    return field(default=default, metadata={CHANGEABLE: True})


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Base of all algorithms: frozen hyper-parameters, and one generator per bucket and step.

    ``bucket_bytes`` is the fusion threshold (GradientFlow's θ, BAGUA's bucket size): tensors are packed in the order in which
    gradients become ready, and a bucket is closed when it holds at least this many bytes.

    A combination holds other algorithms in its fields. It defines :meth:`exchange`; all other methods ask the parts and join
    their answers, unless it overrides them.
    """

    bucket_bytes: int = USUAL

    def __init_subclass__(cls, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "subject" in vars(cls):
            raise TypeError(f"{cls.__name__}.subject: an algorithm says what it moves in its traits: Traits(subject=…)")
        if register:
            _REGISTRY[cls.__name__] = cls

    def __post_init__(self) -> None:
        if isinstance(self.bucket_bytes, _Usual):
            parts = parts_of(self)
            object.__setattr__(self, "bucket_bytes", parts[-1].bucket_bytes if parts else int(USUAL))
        if not is_whole(self.bucket_bytes, 1):
            raise ConfigurationError(f"bucket_bytes must be a positive number of bytes; got {self.bucket_bytes!r}")

    @cached_property
    def traits(self) -> Traits:
        """What the algorithm is, as one record. Of a combination: its parts' traits, joined field by field."""
        parts = self._parts()
        return what.joined(part.traits for part in parts) if parts else Traits()

    @cached_property
    def cadence(self) -> Cadence:
        """At which steps it exchanges: at every step by default."""
        parts = self._parts()
        return cadences.joined(part.cadence for part in parts) if parts else Cadence()

    @property
    def subject(self) -> Subject:
        """What it exchanges, gradients or weights: short for ``traits.subject``."""
        return self.traits.subject

    @abstractmethod
    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        """Communicate one bucket.

        ``bucket.flat`` may be written: it is filled anew before the next exchange. Returns the gradient
        to use instead, a tensor like ``bucket.flat``, or itself; where weights are exchanged, what to add to them before their
        next update, a flat tensor of their type or a :class:`gossamer.algorithms.blocks.difference.Difference` of messages.
        The returned tensors are given away: keep no reference to them.
        Writes to ``state`` take effect only when the whole step has succeeded.
        """

    def begin(self, bucket: Bucket, state: State, ctx: Context) -> None:
        """Keep in ``state`` what outer steps begin from: the weights in ``bucket``, the same on all workers.

        Called once, before the first update, of algorithms whose exchanges move the mean of the workers (``moves_mean``).
        """
        for part in self._parts():
            part.begin(bucket, state, ctx)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype in which weights of type ``dtype`` are packed into their bucket. An algorithm that only sends weights
        returns the wire's dtype: ``bucket.flat`` then is the message."""
        said = {part.message_dtype(dtype) for part in parts_of(self)}
        return said.pop() if len(said) == 1 else dtype

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        """A flow that runs once per step, after the exchanges of all ``buckets``; ``None`` (the default): there is none.

        ``states``: one for each bucket; ``state``: one for the step. Where gradients are exchanged it runs during the next
        forward pass: read the states and not the buckets, which the optimizer uses by then. The next exchange sees what it
        writes.
        """
        flows = [part.finish(buckets, states, state, ctx) for part in self._parts()]
        there = [flow for flow in flows if flow is not None]
        return in_turn(there) if there else None

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        """This worker's term of the sum over workers that exchanges conserve, for the bucket that ``state`` belongs to.

        Of gradients ``flat``: these and the residual. Of weights ``flat``: these, times their weight in the mean (push-sum).
        Another algorithm that takes its place, and a checkpoint of another number of ranks, go on from that. Returns ``flat``
        itself, which is only read, where nothing is kept.
        """
        if len(parts := self._parts()) == 1:
            return parts[0].hand_over(flat, state, ctx)
        residual = state.get(RESIDUAL) if self.subject == "gradients" else None
        return flat if residual is None else wide(flat) + residual

    def put_back(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        """Add ``mean`` to the residual: the part at ``place`` of an exchange's result that no worker uses, as its parameter has
        no gradient on any rank. Returns whether there is a residual.

        Called on all workers. As the result is the mean of what all have sent, the sum of the residuals is again what it was
        before the exchange.
        """
        if len(parts := self._parts()) == 1:
            return parts[0].put_back(mean, place, state, ctx)
        return keep_unsent(mean, place, state, ctx)

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        """Raise ConfigurationError if this cannot run among ``world`` workers, or, once these are known, on ``nodes``."""
        for part in self._parts():
            part.check(world, nodes)

    def part(self, subject: Subject) -> "Algorithm | None":
        """The part of this algorithm that exchanges gradients, or weights: mostly itself, or None."""
        found = [part.part(subject) for part in self._parts()]
        if not found:
            return self if self.subject == subject else None
        if all(each is None for each in found):
            return None
        return self._with(lambda part: part.part(subject) or NOTHING)

    def route(self, name: str, tensor: Tensor) -> "Algorithm":
        """The algorithm that handles a parameter. Parameters of different handlers never share a bucket."""
        return self._with(lambda part: part.route(name, tensor))

    def attach(self, parameters: Sequence[Tensor], momentum: float) -> "Algorithm":
        """The algorithm for these parameters. ``momentum``: that of their optimizer, taken out of it for an algorithm that
        ``takes_momentum``. Raises ConfigurationError where there is nothing for it to do."""
        return self._with(lambda part: part.attach(parameters, momentum))

    def _fields(self) -> dict[str, "Algorithm"]:
        """The algorithms that it is made of, by the names of the fields that hold them."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Algorithm)}

    def _parts(self) -> tuple["Algorithm", ...]:
        """The algorithms that it is made of; none where it is one by itself."""
        return tuple(self._fields().values())

    def _with(self, change: Callable[["Algorithm"], "Algorithm"]) -> Self:
        """The same with its parts changed; ``bucket_bytes`` follows the last part, if it did so before."""
        before = self._fields()
        parts = {name: change(part) for name, part in before.items()}
        if all(parts[name] is part for name, part in before.items()):
            return self
        there = parts_of(self)
        follows = not there or self.bucket_bytes == there[-1].bucket_bytes
        return replace(self, **parts, bucket_bytes=USUAL if follows else self.bucket_bytes)


@dataclass(frozen=True, kw_only=True)
class Nothing(Algorithm, register=False):
    """Exchanges nothing: the part of a combination in which there is nothing to exchange."""

    @property
    def traits(self) -> Traits:
        return Traits(keeps_unsent=False, by_samples=True)

    @property
    def cadence(self) -> Cadence:
        return cadences.NEVER

    def part(self, subject: Subject) -> Algorithm | None:
        return None

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        """Gradients stay this worker's own."""
        yield from ()
        return bucket.flat.mul_(ctx.world) if bucket.holds_shares else bucket.flat


def parts_of(algorithm: Algorithm) -> tuple[Algorithm, ...]:
    """The algorithms that one is made of; none where it is one by itself."""
    return tuple(part for part in algorithm._parts() if not isinstance(part, Nothing))


NOTHING = Nothing()


def finishes(algorithm: Algorithm) -> bool:
    """Whether ``algorithm.finish`` may have anything to do."""
    parts = algorithm._parts()
    return any(map(finishes, parts)) if parts else type(algorithm).finish is not Algorithm.finish


def unaveraged(handlers: Sequence[Algorithm], ctx: Context) -> int:
    """Number of gradients that enter the mean update of a step unaveraged: ``ctx.world`` where ``handlers`` exchange weights
    at this step (by node: the number of nodes), else 1."""
    found = [1]
    for handler in handlers:
        if handler.subject == "weights" and handler.cadence.runs(ctx.step):
            nodes = handler.traits.nodes
            per_node = handler.traits.ranks_per_node
            among = len(ctx.machines) if per_node is None else -(-ctx.world // per_node)
            found.append(among if nodes else ctx.world)
    return max(found)


def keep_unsent(mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
    """Add ``mean`` to that ``place`` of the residual, if one was written in this exchange; say whether it was."""
    residual = state.written(RESIDUAL)
    if residual is None:
        return False
    add_to(place.view(residual), mean, ctx.seed(place.offset))
    return True


def in_turn(flows: Sequence[Flow[None]]) -> Flow[None]:
    """One flow after the other."""
    for flow in flows:
        yield from flow


def check_gather_below(nbytes: object) -> None:
    """Raise ConfigurationError unless it is a number of bytes below which a bucket is gathered whole from all."""
    if not is_whole(nbytes, 0):
        raise ConfigurationError(f"gather_below must be a number of bytes, or 0 for never; got {nbytes!r}")


def wrong_shape(algorithm: Algorithm, bucket: Bucket, result: Tensor) -> ConfigurationError:
    """The error for an exchange whose result does not fit its bucket."""
    name, expected = type(algorithm).__name__, list(bucket.flat.shape)
    return ConfigurationError(f"{name}.exchange returned shape {list(result.shape)} for {bucket}; expected {expected}")


def registry() -> dict[str, type[Algorithm]]:
    """Every algorithm there is, by name."""
    return dict(sorted(_REGISTRY.items()))
