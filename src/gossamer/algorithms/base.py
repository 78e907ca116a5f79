"""Algorithm: one relaxation of the exchange, written as a generator that never touches the network."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.buckets import Bucket, Segment
from gossamer.checks import is_whole
from gossamer.codecs.residual import add_to
from gossamer.comm.ops import Flow, Group
from gossamer.errors import ConfigurationError
from gossamer.state import RESIDUAL, State

Subject = Literal["gradients", "weights"]

_REGISTRY: dict[str, type["Algorithm"]] = {}


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow may know: the step, and the members of this step's epoch.

    ``members`` are stable ids, not a fixed world: they may change between steps, never within a flow.
    ``rank`` is this worker's index among them; ``nodes`` says which indices share a machine (each its own if unknown).
    """

    step: int
    rank: int
    members: tuple[int, ...]
    nodes: tuple[Group, ...] | None = None

    @property
    def world(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def machines(self) -> tuple[Group, ...]:
        """The indices of each machine's members."""
        return self.nodes if self.nodes is not None else tuple((rank,) for rank in range(self.world))

    def seed(self, *what: int) -> int:
        """A number for this step, this worker and ``what`` else: below 2^63, for codecs that round at random.

        Another one for every worker there is, also where this one is among those of its machine only; and for one that
        leads its machine another one there than among the leaders, even of two.
        """
        value = 0x9E3779B97F4A7C15
        for part in (self.step, self.members[self.rank], self.members[-1], *what):
            value = ((value ^ part) * 0xBF58476D1CE4E5B9) % 2**64
            value ^= value >> 29
        return value >> 1


@dataclass(frozen=True, kw_only=True)
class Algorithm(ABC):
    """Base of all algorithms: frozen hyper-parameters, and one generator per bucket and step.

    ``bucket_bytes`` is the fusion threshold (GradientFlow's θ, BAGUA's bucket size): tensors are laid out in the
    order in which gradients become ready, and a bucket is closed when it holds at least this many bytes.
    """

    subject: ClassVar[Subject] = "gradients"
    exact: ClassVar[bool] = False
    """Whether the result is the mean of all workers, to rounding, and zero only where the mean is."""
    takes_shares: ClassVar[bool] = False
    """Whether it knows ``Bucket.holds_shares``: gradients are divided by the number of workers as they are laid into
    their bucket, which costs nothing there, and a pass over memory later."""
    prompt: ClassVar[bool] = False
    """Whether an exchange starts all of its operations before it waits for any, and computes next to nothing: then no
    thread of its own has to run it."""
    averages_buffers: ClassVar[bool] = True
    """Whether buffers may travel with the weights (``buffers="average"``)."""
    weighs: ClassVar[bool] = False
    """Whether replicas do not all count alike in the mean that is kept: see :meth:`counted`."""
    moves_mean: ClassVar[bool] = False
    """Whether exchanges of weights move the mean of the workers, as an outer optimizer does. All others keep it."""

    bucket_bytes: int = 2 * 2**20

    def __init_subclass__(cls, register: bool = True, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if register:
            _REGISTRY[cls.__name__] = cls

    def __post_init__(self) -> None:
        if not is_whole(self.bucket_bytes, 1):
            raise ConfigurationError(f"bucket_bytes must be a positive number of bytes; got {self.bucket_bytes!r}")

    @abstractmethod
    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Any]:
        """Communicate one bucket.

        ``bucket.flat`` may be written: it is filled anew before the next exchange. Returns, for ``subject = "gradients"``, the
        gradient to use instead, a tensor like ``bucket.flat``, or itself; for ``"weights"`` what to add to the weights before
        their next update, a flat tensor of their type or a :class:`gossamer.algorithms.difference.Difference` of messages.
        The returned tensors are given away: keep no reference to them.
        Writes to ``state`` take effect only when the whole step has succeeded.
        """

    def message_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type in which weights of type ``dtype`` are packed into their bucket: that of the message, if that is all that is
        made of them, so that ``bucket.flat`` is the message."""
        return dtype

    @property
    def finishes(self) -> bool:
        """Whether :meth:`finish` may have anything to do."""
        return type(self).finish is not Algorithm.finish

    def finishes_at(self, step: int) -> bool:
        """Whether :meth:`finish` is called at the end of ``step``."""
        return self.finishes and self.due(step)

    def finish(self, buckets: Sequence[Bucket], states: Sequence[State], state: State, ctx: Context) -> Flow[None] | None:
        """Once per step after the last bucket, for what belongs to the step; ``None`` (the default) for nothing.

        For gradients, it runs beside the next forward pass: take from ``states`` what it needs, not from the buckets, which
        are the optimizer's by then. What it writes is there in the next exchange.
        ``states`` are those of ``buckets``; ``state`` is the step's own.
        """
        return None

    def owed(self, state: State, ctx: Context) -> Tensor | None:
        """What this worker still owes to the sum over all workers, of the bucket that ``state`` belongs to; None: nothing.

        An algorithm that takes its place (:func:`after`) communicates that with its first gradient.
        """
        return state.get(RESIDUAL)

    def owe(self, mean: Tensor, place: Segment, state: State, ctx: Context) -> bool:
        """Owe ``mean`` on, that part of an exchange's result which nobody is going to use, and say whether that is remembered.

        ``place``: where in the bucket it is. Every worker is asked, and the result is the mean of what all have sent: with it,
        the sum of what is owed is again what it was. Where the exchange kept nothing back, nothing is to be done.
        """
        residual = state.written(RESIDUAL)
        if residual is None:
            return False
        add_to(place.view(residual), mean, ctx.seed(place.offset))
        return True

    def counted(self, weights: Tensor, state: State, ctx: Context) -> Tensor:
        """What this worker's weights count as in the mean over workers that exchanges keep: themselves, unless it ``weighs``.

        ``weights``: all of a bucket, with the result of its last exchange, which ``state`` is of, and updates since then.
        """
        return weights

    @property
    def keeps_back(self) -> bool:
        """Whether it may remember what it has not sent of a gradient (under ``RESIDUAL``)."""
        return not self.exact

    @property
    def takes_momentum(self) -> bool:
        """Whether :meth:`attach` takes the momentum out of the optimizer, for as long as the replica is open."""
        return False

    def gradients_apart(self, ctx: Context) -> int:
        """Of how many gradients that no worker averages with others' the mean update of a step is made: all workers' where
        weights travel, 1 where gradients do."""
        return ctx.world if self.subject == "weights" else 1

    @property
    def exchanges_history(self) -> bool:
        """Whether what the optimizer remembers of each weight travels with the weights."""
        return False

    @property
    def lands_late(self) -> bool:
        """Whether what an exchange of weights brings is added after the next update, and not before it."""
        return False

    def ahead_at(self, step: int) -> float:
        """How many updates like the last one a message of weights is ahead of them, where it leaves at ``step``."""
        return 0.0

    @property
    def may_lag(self) -> int:
        """How many steps longer than one an exchange of weights may take before it is waited for: then ranks need not
        be at the same step, and exchanges are numbered by themselves (:meth:`step_of`)."""
        return 0

    def step_of(self, exchange: int) -> int:
        """The step of the exchange of this number (0, 1, …), if none takes longer than it should."""
        return exchange

    @property
    def changes(self) -> frozenset[int]:
        """At which steps another part's time begins. Exchanges of weights are numbered by the steps of their optimizer, but
        these steps are the replica's, whose backward passes may be more."""
        return frozenset()

    @property
    def asks_for_machines(self) -> bool:
        """Whether it must be known which workers share a machine."""
        return False

    @property
    def workers_per_machine(self) -> int | None:
        """How many consecutive ranks share a machine, where it is the algorithm that says so."""
        return None

    @property
    def by_machine(self) -> bool:
        """Whether some workers speak for others, so that what they remember is not for others to go on with."""
        return False

    @property
    def traffic_period(self) -> int:
        """After how many steps what travels repeats itself, as far as bytes and messages go."""
        return 1

    def traffic_cycle(self, world: int, machines: int) -> int:
        """After how many steps ``world`` workers on so many machines meet the same partners again, so that as much leaves a
        machine as before. Of partners that are drawn at random: how many steps belong together."""
        return self.traffic_period

    @property
    def weight_parts(self) -> int:
        """Into how many even parts the weights are cut, so that :meth:`route` can tell them apart (``gossamer.pieces``)."""
        return 1

    def check(self, world: int) -> None:  # noqa: B027  (most run in any world)
        """Raise ConfigurationError if this cannot run among ``world`` workers."""

    def check_machines(self, machines: Sequence[Group]) -> None:  # noqa: B027  (most do not ask who shares one)
        """Raise ConfigurationError if this cannot run among workers who share ``machines`` in this way."""

    def due(self, step: int) -> bool:
        """Whether anything is exchanged at ``step``; if not, gradients or weights stay this worker's own."""
        return True

    def part(self, subject: Subject) -> "Algorithm | None":
        """What of this algorithm moves gradients, or weights. Most are one or the other."""
        return self if self.subject == subject else None

    def route(self, name: str, tensor: Tensor) -> str:
        """A label for a parameter: those of different labels never share a bucket, and :meth:`of` says who handles them."""
        return ""

    def of(self, label: str) -> "Algorithm":
        """The algorithm for the buckets with this label."""
        return self

    def overtaking(self) -> "Algorithm":
        """The same for buckets of which some are needed while longer ones are on the line (``overlap_forward``)."""
        return self

    def attach(self, optimizers: Sequence[Optimizer]) -> "Algorithm":
        """What to run with these optimizers. An algorithm that takes something over from them (their momentum) does so here."""
        return self

    def detach(self, optimizers: Sequence[Optimizer]) -> None:  # noqa: B027  (most take nothing)
        """Give back what :meth:`attach` took."""


def check_gather_below(nbytes: object) -> None:
    """Raise ConfigurationError unless it is a number of bytes below which a bucket is gathered whole from all."""
    if not is_whole(nbytes, 0):
        raise ConfigurationError(f"gather_below must be a number of bytes, or 0 for never; got {nbytes!r}")


def left_alone(bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
    """In place of an exchange of gradients that is not due while another bucket's is: they stay this worker's own."""
    yield from ()
    return bucket.flat.mul_(ctx.world) if bucket.holds_shares else bucket.flat


def wrong_shape(algorithm: Algorithm, bucket: Bucket, result: Tensor) -> ConfigurationError:
    """The error for an exchange whose result does not fit its bucket."""
    name, expected = type(algorithm).__name__, list(bucket.flat.shape)
    return ConfigurationError(f"{name}.exchange returned shape {list(result.shape)} for {bucket}; expected {expected}")


def registry() -> dict[str, type[Algorithm]]:
    """Every algorithm there is, by name."""
    return dict(sorted(_REGISTRY.items()))
