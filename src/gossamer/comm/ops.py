"""Flow: what an algorithm may ask of the network, as a generator of operations that are data, and how a port carries it out.

An algorithm is a generator. It yields a :class:`Start` and is sent back a handle; it yields a :class:`Wait` for that
handle and is sent back the result. ``yield from all_reduce(x)`` is both. The same vocabulary is carried out by three
runners: real processes, ranks inside one process, and virtual time on ``meta`` tensors. The operations themselves are in
:mod:`gossamer.comm.operations`.
"""

import re
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from gossamer.comm.operations import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Op,
    Permute,
    Push,
)
from gossamer.comm.topology import Permutation, shift

__all__ = [
    "SMALL",
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Broadcast",
    "Command",
    "Context",
    "Decide",
    "Flow",
    "Group",
    "Op",
    "Permute",
    "Push",
    "Start",
    "Wait",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "decide",
    "maximum",
    "perform",
    "permute",
    "start",
    "total",
    "wait",
    "within",
]

T = TypeVar("T")

Group = tuple[int, ...]
"""Some of the members, by index, in order. Ranks and worlds of an operation count within it."""


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """Ask for an operation; the runner sends back a handle without waiting.

    ``group``: those who take part, if not all members; this rank is one of them. Others do not yield it.
    """

    op: Op
    group: Group | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """Wait for a started operation; the runner sends back its result."""

    handle: Any


@dataclass(frozen=True, slots=True, eq=False)
class Decide:
    """A decision that depends on data. Runners with values send back ``fn()``; those without send ``default``."""

    name: str
    default: Any
    fn: Callable[[], Any]


Command = Start | Wait | Decide
Flow = Generator[Command, Any, T]


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow may know: the step, and the members of this step's epoch.

    ``members`` are stable ids, not a fixed world: they may change between steps, never within a flow.
    ``rank`` is this worker's index among them; ``nodes`` says which indices share a machine (each its own if unknown).
    ``overtakes``: some buckets are needed while longer ones are under way (``overlap_forward``). ``samples``: on how many this
    worker has trained since the last exchange of these weights; None: workers count alike (:meth:`gossamer.Replica.weigh`).
    """

    step: int
    rank: int
    members: tuple[int, ...]
    nodes: tuple[Group, ...] | None = None
    overtakes: bool = False
    samples: float | None = None

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


def start(op: Op) -> Start:
    """``handle = yield start(op)``."""
    return Start(op)


def wait(handle: Any) -> Wait:
    """``result = yield wait(handle)``."""
    return Wait(handle)


def decide(name: str, default: T, fn: Callable[[], T]) -> Decide:
    """``choice = yield decide(name, default, fn)``: on ``meta`` tensors the default is taken."""
    return Decide(name, default, fn)


def perform(op: Op) -> Flow[Tensor]:
    """Start an operation and wait for its result."""
    handle = yield Start(op)
    result: Tensor = yield Wait(handle)
    return result


def all_reduce(tensor: Tensor, reduce: Literal["sum", "max"] = "sum") -> Flow[Tensor]:
    """Sum or maximum of ``tensor`` over all ranks. Divide before, not after: a half-precision sum overflows."""
    return (yield from perform(AllReduce(tensor, reduce)))


SMALL = 2**16
"""Bytes received up to which gathering everything from all is better than passing parts on: on a busy link every message
that waits for another one also waits for what is queued before it (2.4 kB among four, beside 1.6 MB at 200 Mbit/s: 150 ms
as a ring)."""


def total(tensor: Tensor, world: int, gather_below: int = SMALL) -> Flow[Tensor]:
    """The sum of ``tensor`` over all ``world`` ranks; one of which at most ``gather_below`` bytes arrive is gathered and
    summed by everyone in the same order."""
    if 1 < world <= 1 + gather_below / max(1, tensor.nbytes):
        return torch.sum((yield from all_gather(tensor)), 0, dtype=tensor.dtype)
    return (yield from all_reduce(tensor))


def permute(tensor: Tensor, permutation: Permutation, into: Tensor | None = None) -> Flow[Tensor]:
    """Send ``tensor`` along ``permutation``; the result is what arrived (in ``into``, or in another tensor)."""
    return (yield from perform(Permute(tensor, permutation, into)))


def maximum(tensor: Tensor, world: int) -> Flow[Tensor]:
    """The elementwise maximum of ``tensor`` over all ``world`` ranks, for small tensors: ⌈log2 p⌉ messages (dissemination).

    A ring all-reduce sends fewer bytes in 2·(p−1) messages one after the other; here only their number counts.
    """
    for hop in range((world - 1).bit_length()):
        tensor = torch.maximum(tensor, (yield from permute(tensor, shift(2**hop % world, world))))
    return tensor


def all_to_all(tensor: Tensor) -> Flow[Tensor]:
    """Transpose a ``(world, n)`` tensor between the ranks."""
    return (yield from perform(AllToAll(tensor)))


def all_gather(tensor: Tensor) -> Flow[Tensor]:
    """The tensors of all ranks, stacked: ``(world, *tensor.shape)``."""
    return (yield from perform(AllGather(tensor)))


def broadcast(tensor: Tensor, source: int = 0) -> Flow[Tensor]:
    """The tensor of rank ``source``."""
    return (yield from perform(Broadcast(tensor, source)))


def within(flow: Flow[T], group: Group) -> Flow[T]:
    """The same flow among the ranks of ``group`` only. A group inside of it counts within it."""
    reply: Any = None
    while True:
        try:
            command = flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if isinstance(command, Start):
            inner = command.group
            command = Start(command.op, group if inner is None else tuple(group[rank] for rank in inner))
        reply = yield command


class Port(Protocol):
    """One ordered channel to the other ranks: the k-th operation started on it meets the k-th of every other rank."""

    def start(self, op: Op, group: Group | None = None) -> Any:
        """Hand an operation to the transport, among all members or those of ``group``; returns a handle."""

    def wait(self, handle: Any) -> Tensor:
        """Block (or, on a device, order the stream) until the operation is done; returns its result."""

    def decide(self, decision: Decide) -> Any:
        """Take a decision that depends on data."""


class Begun(Generic[T]):
    """A flow on its way: ``handle`` is what it waits for, until it has ``ended`` with its ``result``."""

    def __init__(self, flow: Flow[T], port: Port) -> None:
        self.handle: Any = None
        self.may_start = True
        """Whether more operations may be started."""
        self.ended = False
        self.result: T | None = None
        self._flow, self._port = flow, port
        self.go_on(None)

    def go_on(self, reply: Any) -> None:
        """Carry out, on the port, every command until it waits again, or ends; ``reply`` is what it waited for."""
        while True:
            try:
                command = self._flow.send(reply)
            except StopIteration as stop:
                self.result, self.ended = stop.value, True
                return
            if isinstance(command, Wait):
                self.handle = command.handle
                return
            if isinstance(command, Start) and not self.may_start:
                raise TypeError(f"a prompt algorithm starts everything before it waits; {command.op} came later")
            reply = answer(command, self._port)


def answer(command: Command, port: Port) -> Any:
    """Carry out a command that is no wait; what the flow is sent back."""
    if isinstance(command, Start):
        return port.start(command.op, command.group)
    if isinstance(command, Decide):
        return port.decide(command)
    raise TypeError(f"an algorithm yielded {command!r}; only start(op), wait(handle) and decide(…) are known")


def drive(flow: Flow[T], port: Port, label: str = "") -> T:
    """Carry out every command that ``flow`` yields on ``port`` and return what the flow returns."""
    begun = Begun(flow, port)
    while not begun.ended:
        with shown("wire", label):
            reply = port.wait(begun.handle)
        begun.go_on(reply)
    return begun.result  # type: ignore[return-value]


_STEP = re.compile(r"( (at|after|of( the optimizer's)?))? step \d+$")
_NOTHING = nullcontext()


def shown(what: str, label: str) -> AbstractContextManager[Any]:
    """Show what runs inside as ``gossamer: <what> of <label>``, without the number of a step, so that steps can be summed up.

    Where there is no profiler, which is asked first, it costs less than a microsecond. Lanes are threads of their own:
    a profiler sees their flows with ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
    """
    # The flag of the process: the one of the thread is False everywhere where a profiler follows all threads.
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    name = _STEP.sub("", label).replace("…", "...")  # a Chrome trace says "unknown" for what is not ASCII
    return torch.profiler.record_function(f"gossamer: {what} of {name}")
