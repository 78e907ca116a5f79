"""Algorithm: one relaxation of the exchange, written as a generator that never touches the network."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
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


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Base of all algorithms: frozen hyper-parameters, and one generator per bucket and step.

    ``bucket_bytes`` is the fusion threshold (GradientFlow's θ, BAGUA's bucket size): tensors are laid out in the
    order in which gradients become ready, and a bucket is closed when it holds at least this many bytes.

    An algorithm that is made of others, which are its fields, is what they are together, and does what they do: everything but
    :meth:`exchange` is theirs, unless it says otherwise.
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

    @property
    def traits(self) -> Traits:
        """What it is: one record."""
        parts = self._parts()
        return what.joined(part.traits for part in parts) if parts else Traits()

    @property
    def cadence(self) -> Cadence:
        """When it exchanges: in every step by default."""
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
        """Remember of the weights in ``bucket``, before their first update, what exchanges that move the mean begin from.

        All workers have the same weights then. Asked of algorithms whose traits have ``moves_mean``, once in a training.
        """
        for part in self._parts():
            part.begin(bucket, state, ctx)

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which weights of type ``dtype`` are packed into their bucket: that of the message, if that is all that is
        made of them, so that ``bucket.flat`` is the message."""
        said = {part.message_dtype(dtype) for part in parts_of(self)}
        return said.pop() if len(said) == 1 else dtype

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        """Once per step after the last bucket, for what belongs to the step; ``None`` (the default) for nothing.

        For gradients, it runs beside the next forward pass: take from ``states`` what it needs, not from the buckets, which
        are the optimizer's by then. What it writes is there in the next exchange.
        ``states`` are those of ``buckets``; ``state`` is the step's own.
        """
        flows = [part.finish(buckets, states, state, ctx) for part in self._parts()]
        there = [flow for flow in flows if flow is not None]
        return in_turn(there) if there else None

    def hand_over(self, flat: Tensor, state: State, ctx: Context) -> Tensor:
        """This worker's term of the sum over workers that exchanges conserve, for the bucket that ``state`` belongs to.

        Of gradients ``flat``: with what is not sent yet. Of weights ``flat``: as often as they count in the mean that is kept
        (push-sum). That is all that has to go on where another algorithm takes its place, or others share out a saved state.
        Returns ``flat`` itself, which is only read, where nothing is kept.
        """
        if len(parts := self._parts()) == 1:
            return parts[0].hand_over(flat, state, ctx)
        residual = state.get(RESIDUAL) if self.subject == "gradients" else None
        return flat if residual is None else wide(flat) + residual

    def put_back(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        """Keep ``mean`` as unsent, that part of an exchange's result which nobody is going to use; say whether that is kept.

        ``place``: where in the bucket it is. Every worker is asked, and the result is the mean of what all have sent: with it,
        the sum of what is unsent is again what it was. Where the exchange kept nothing back, nothing is to be done.
        """
        if len(parts := self._parts()) == 1:
            return parts[0].put_back(mean, place, state, ctx)
        return keep_unsent(mean, place, state, ctx)

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        """Raise ConfigurationError if this cannot run among ``world`` workers, or, once these are known, on ``nodes``."""
        for part in self._parts():
            part.check(world, nodes)

    def part(self, subject: Subject) -> "Algorithm | None":
        """What of this algorithm moves gradients, or weights. Most are one or the other."""
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
        """What to run with the optimizers of these parameters; ``momentum``: what was taken out of them for one that
        ``takes_momentum``. Raise ConfigurationError where there is nothing for it to do."""
        return self._with(lambda part: part.attach(parameters, momentum))

    def _fields(self) -> dict[str, "Algorithm"]:
        """The algorithms that it is made of, by the names of the fields that hold them."""
        held = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in held.items() if isinstance(value, Algorithm)}

    def _parts(self) -> tuple["Algorithm", ...]:
        """The algorithms that it is made of; none where it is one by itself."""
        return tuple(self._fields().values())

    def _with(self, change: Callable[["Algorithm"], "Algorithm"]) -> Self:
        """The same, made of what ``change`` makes of its parts, with buckets as long as those of the last one, if they were."""
        parts = {name: change(part) for name, part in self._fields().items()}
        if not parts:
            return self
        there = parts_of(self)
        follows = not there or self.bucket_bytes == there[-1].bucket_bytes
        return replace(self, **parts, bucket_bytes=USUAL if follows else self.bucket_bytes)


@dataclass(frozen=True, kw_only=True)
class Nothing(Algorithm, register=False):
    """Exchanges nothing: in place of an algorithm where there is none."""

    @property
    def traits(self) -> Traits:
        return Traits(keeps_unsent=False)

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
