"""Torch ports: operations of the vocabulary on the process groups of ``torch.distributed``."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gossamer.comm import ops
from gossamer.comm.operations import Messages, alone, result_like
from gossamer.comm.ops import Decide, Group, Op
from gossamer.comm.runner import Meter, Ticket
from gossamer.comm.shaper import Shaper
from gossamer.comm.torch.send_window import TOGETHER, Post, SendWindow

REDUCE: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}
"""Reductions by their names in the vocabulary."""


@dataclass(slots=True)
class Pending:
    """A started operation: what to wait for, and the tensor that then holds the result."""

    op: Op
    works: Sequence[Any]
    result: Tensor
    peers: object = ""
    due: float = 0.0
    latency: float = 0.0
    """Emulated seconds between the moment at which the bytes are there and the one at which they may be known to be."""
    seen_under_way: bool = False
    ticket: Ticket[Any] | None = None
    collective: bool = False
    """Whether Gloo lets a wait for it end early. One for a single message ends its connection instead."""


@dataclass(frozen=True, slots=True)
class Circle:
    """The process groups of those who take part in an operation: one for sending up, one for sending down."""

    up: Any
    down: Any
    names: Group
    near: bool = False
    """Whether a message takes so short a time that one may wait for another."""

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        place: int = self.up.rank()
        return place

    @property
    def world(self) -> int:
        """How many they are."""
        return len(self.names)


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks that an operation waits for; as a text, in words."""

    op: Op
    circle: Circle

    def __str__(self) -> str:
        rank, world, names = self.circle.rank, self.circle.world, self.circle.names
        return self.op.peers(rank, world) + ("" if names == tuple(range(world)) else f", counted among ranks {list(names)}")


PIECE = 2**20
"""Bytes that travel as one Gloo message. Each message begins with a round trip that queues behind the data of the
other direction; with several posted together, one is always on the wire (8 MB between a pair at 1 Gbit/s: 852 Mbit/s as
one message, 890 in pieces; plain TCP 934)."""


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a contiguous tensor, each of at most ``PIECE`` bytes."""
    if tensor.nbytes <= PIECE:
        return [tensor]
    split: Sequence[Tensor] = tensor.view(-1).split(PIECE // tensor.element_size())
    return split


class GlooPort:
    """One lane on Gloo, blocking its own thread only.

    Two process groups, because one Gloo connection behaves half-duplex: ``up`` carries what is sent to a higher rank,
    ``down`` what is sent to a lower one, so that the two directions between a pair never share a connection.
    """

    def __init__(
        self, everyone: Circle, open_circle: Callable[[Group], Circle], meter: Meter, shaper: Shaper | None = None
    ) -> None:
        self.ticket: Ticket[Any] | None = None
        self._open_circle, self._meter, self._shaper = open_circle, meter, shaper
        self._everyone, self._circles = everyone, {everyone.names: everyone}
        self._window = SendWindow()

    def start(self, op: Op, group: Group | None = None) -> Pending:
        circle = self._everyone if group is None else self._circle(group)
        self._meter.count(op, circle.world, circle.rank)
        if op.tensor.numel() == 0:
            return Pending(op, [], result_like(op, circle.world, circle.rank))
        if circle.world == 1:
            return Pending(op, [], alone(op))
        pending = self._issue(op, circle)
        pending.peers, pending.ticket = Peers(op, circle), self.ticket
        if self._shaper is not None and pending.works:  # none: a rank that has a bye
            traffic = op.traffic(circle.world)
            pending.due = self._shaper.due(traffic, time.perf_counter())
            pending.latency = self._shaper.after(traffic)
        return pending

    def _circle(self, group: Group) -> Circle:
        """The process groups of some ranks, made by them when they first need them."""
        if group not in self._circles:
            if self.ticket is not None:
                self.ticket.doing, self.ticket.peers = "making connections", f"ranks {list(group)}"
            self._circles[group] = self._open_circle(group)
        return self._circles[group]

    def wait(self, handle: Pending) -> Tensor:
        begin = time.perf_counter()
        _describe(handle)
        for work in handle.works:
            work.wait()
        # A single message never says that it is completed: what did not block came before anyone looked.
        handle.seen_under_way |= time.perf_counter() - begin > _BLOCKED
        _delay(handle)
        Shaper.sleep_until(handle.due)
        self._meter.wire_seconds += time.perf_counter() - begin
        return handle.result

    def interruptible(self, handle: Pending) -> bool:
        """Whether :meth:`arrives` can be asked: whether a wait for the operation can be cut short."""
        return handle.collective or not handle.works

    def arrives(self, handle: Pending, seconds: float) -> bool:
        """Whether the operation has ended, well or not, within so many seconds."""
        begin = time.perf_counter()
        _describe(handle)
        handle.seen_under_way |= not all(work.is_completed() for work in handle.works)
        ended = all(_ends(work, seconds - (time.perf_counter() - begin)) for work in handle.works)
        if ended:
            _delay(handle)
        if ended and handle.due > begin + seconds:
            Shaper.sleep_until(begin + seconds)
            ended = False
        self._meter.wire_seconds += time.perf_counter() - begin
        return ended

    @staticmethod
    def broke(handle: Pending) -> bool:
        """Whether the operation has ended with an error."""
        return any(work.is_completed() and not _ended_well(work) for work in handle.works)

    def decide(self, decision: Decide) -> Any:
        return decision.fn()

    def _issue(self, op: Op, circle: Circle) -> Pending:
        if isinstance(op, ops.AllReduce | ops.Broadcast):
            self._window.empty()
        if isinstance(op, ops.AllReduce):
            options = dist.AllreduceOptions()
            options.reduceOp = REDUCE[op.reduce]
            return Pending(op, [circle.up.allreduce([op.tensor], options)], op.tensor, collective=True)
        if isinstance(op, ops.Broadcast):
            source = dist.BroadcastOptions()
            source.rootRank = op.source
            return Pending(op, [circle.up.broadcast([op.tensor], source)], op.tensor)
        result = result_like(op, circle.world, circle.rank)
        if not isinstance(op, Messages):
            raise TypeError(f"the torch runner does not know {op}")
        outgoing, incoming = op.outgoing(circle.rank, circle.world), op.incoming(circle.rank, circle.world, result)
        if op.to_all and circle.world > 2 and circle.near and (circle.world - 1) * incoming[0][1].nbytes > TOGETHER:
            return Pending(op, self._put_in_rounds(circle, dict(outgoing), dict(incoming)), result)
        post = partial(_post, circle, outgoing, incoming)
        bye = {rank for rank, _ in (*outgoing, *incoming)} <= {circle.rank}  # which waits for nobody
        return Pending(op, post() if bye else self._window.put_together(post), result)

    def _put_in_rounds(self, circle: Circle, outgoing: dict[int, Tensor], incoming: dict[int, Tensor]) -> Sequence[Any]:
        """To and from every rank, where that is much, and they are near each other. In round ``k`` each sends to the one ``k``
        before it."""
        me, world = circle.rank, circle.world
        incoming[me].copy_(outgoing[me])
        messages: list[tuple[Post, int]] = []
        for distance in range(1, world):
            to, source = (me - distance) % world, (me + distance) % world
            for out, into in zip(pieces(outgoing[to]), pieces(incoming[source]), strict=True):
                messages.append((partial(_post, circle, [(to, out)], [(source, into)]), out.nbytes))
        return self._window.put(messages)


def _describe(handle: Pending) -> None:
    if handle.ticket is not None:
        handle.ticket.doing, handle.ticket.peers = handle.op, handle.peers


_BLOCKED = 5e-4
"""Seconds from which on a wait did not return immediately."""


def _delay(handle: Pending) -> None:
    """Now that the bytes are there: let the latency pass. What was there before anyone looked came long enough ago."""
    if handle.latency and handle.seen_under_way:
        handle.due = max(handle.due, time.perf_counter() + handle.latency)
    handle.latency = 0.0


def _ends(work: Any, seconds: float) -> bool:
    if work.is_completed():
        return True
    if seconds < 0.001:  # the shortest wait that torch knows; zero would mean for ever
        return False
    try:
        work.wait(timedelta(seconds=seconds))
    except RuntimeError:
        return bool(work.is_completed())
    return True


def _ended_well(work: Any) -> bool:
    try:
        work.wait()
    except RuntimeError:
        return False
    return True


def _post(circle: Circle, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> list[Any]:
    """Post all receives, then all sends; a rank's message to itself is a copy. Each rank begins with its neighbours."""
    me, world, works = circle.rank, circle.world, list[Any]()
    for source, tensor in sorted(incoming, key=lambda message: (message[0] - me) % world):
        if source != me:
            works += _receive(circle, source, tensor)
    for destination, tensor in sorted(outgoing, key=lambda message: (me - message[0]) % world):
        if destination != me:
            works += _send(circle, destination, tensor)
        else:
            next(mine for source, mine in incoming if source == me).copy_(tensor)
    return works


def _receive(circle: Circle, source: int, tensor: Tensor) -> list[Any]:
    group = circle.up if source < circle.rank else circle.down
    return [group.recv([piece], source, 0) for piece in pieces(tensor)]


def _send(circle: Circle, destination: int, tensor: Tensor) -> list[Any]:
    group = circle.up if destination > circle.rank else circle.down
    return [group.send([piece], destination, 0) for piece in pieces(tensor)]
