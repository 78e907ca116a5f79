"""Runner: carries out flows for one rank, in the order in which they are submitted."""

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch
from torch import Tensor

from gossamer.comm.operations import Traffic
from gossamer.comm.ops import Flow, Group, Op, Port, drive, maximum, shown
from gossamer.errors import CommunicationError, GossamerError
from gossamer.memory import on_host

T = TypeVar("T")


CONTROL = -1
"""The lane of small agreements: CPU tensors, beside the data lanes, so that they never queue behind a bucket."""


@dataclass(slots=True)
class Meter:
    """Counts what one rank handed to the transport: payload bytes, messages, and seconds spent waiting for the wire.

    Each lane has its own, without a lock: only the thread that starts operations counts bytes and messages. Seconds of prompt
    flows are added by the main thread and by the lane's, so that now and then those of one wait may be missing.
    """

    bytes: int = 0
    messages: int = 0
    wire_seconds: float = 0.0
    busy_seconds: float = 0.0
    """What flows that have come to their next wait, or to their end, have taken; ``wire_seconds`` are a part of it."""

    def count(self, op: Op, world: int, rank: int | None = None) -> None:
        """Add one operation, of the ``rank``-th of its members (if it matters which)."""
        self.add(op.traffic(world) if rank is None else op.sent(world, rank))

    def add(self, traffic: Traffic) -> None:
        """Add what was sent."""
        self.bytes += traffic.bytes
        self.messages += traffic.rounds


class Ticket(Generic[T]):
    """The promise of one flow's result.

    Ownership: the lane writes ``doing`` while the flow runs, then ``result`` or ``error``, then sets ``done``; the
    main thread reads the first at any time, the others only after ``done``.
    """

    __slots__ = ("begun", "doing", "done", "error", "event", "label", "peers", "result", "sequence")

    def __init__(self, sequence: int, label: str) -> None:
        self.sequence: int = sequence
        self.label: str = label
        self.begun: bool = False
        # Objects, and not yet texts: these are seldom read, and to write them costs more than to start an operation.
        self.doing: object = "nothing yet"
        self.peers: object = ""
        self.done: threading.Event = threading.Event()
        self.result: T | None = None
        self.error: BaseException | None = None
        self.event: Any = None
        """On a device: comes when it has done what the flow issued. The reader of the result makes its stream wait for it."""

    def carry_out(self, make_flow: Callable[[], Flow[T]], port: Port, stream: Any = None) -> None:
        """Run the flow to its end, on a stream of a device if there is one, keeping its result or its error."""
        self.begun, self.doing = True, "the computation"
        try:
            with without_autocast(), shown("flow", self.label):
                if stream is None:
                    self.result = drive(make_flow(), port, self.label)
                else:
                    with stream:
                        self.result = drive(make_flow(), port, self.label)
                    self.event = stream.record_event()
        except BaseException as error:
            self.error = error
        self.conclude()

    def conclude(self) -> None:
        """It is done, with its result or its error. The operation that it named is let go, with the memory of its tensor."""
        self.doing, self.peers = ("the end", "") if self.error is None else (str(self.doing), str(self.peers))
        self.done.set()

    def wait(self, seconds: float) -> bool:
        """Whether it has ended, within so many seconds. For the main thread."""
        return self.done.wait(seconds)

    @property
    def failed(self) -> bool:
        """Whether it has ended with an error."""
        return self.done.is_set() and self.error is not None

    def __str__(self) -> str:
        peers = str(self.peers)
        return f"{self.doing} of {self.label}" + (f", waiting for {peers}" if peers else "")


@contextmanager
def as_between_steps() -> Iterator[None]:
    """Whatever the forward pass runs in (autocast, inference), an optimizer's step is outside of it."""
    with torch.inference_mode(False), torch.no_grad(), without_autocast():
        yield


def without_autocast() -> AbstractContextManager[Any]:
    """Flows, and updates in the forward pass, compute in their own types, also where the thread runs under autocast."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    if not kinds:
        return nullcontext()
    stack = ExitStack()
    for kind in kinds:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def lane_for(tensor: Tensor) -> int:
    """The lane on which a tensor travels outside of the buckets: control for the host's, the first one for a device's."""
    return CONTROL if on_host(tensor) else 0


class Runner(ABC):
    """One rank's way to the others. Flows submitted to one lane run one after the other, in the same order on all ranks.

    ``rank`` and ``world`` count within the group; ``members`` are the stable ids of its ranks.
    """

    rank: int
    world: int
    lanes: int
    nodes: tuple[Group, ...] | None = None
    """Which ranks share a machine, if that is known."""
    part: int | None = None
    """Which of several groups this one is, if not all processes are in one: those of the other parts of a model have others."""

    def __reduce__(self) -> NoReturn:
        raise TypeError("a replica's connections cannot be copied: copy or save the model, and replica.state_dict()")

    @property
    def members(self) -> tuple[int, ...]:
        """Stable ids of the current members."""
        return tuple(range(self.world))

    def meets(self, group: Any) -> bool:
        """Whether a process group of torch has more than one of the members, so that its exchanges are among them."""
        return True

    def now(self) -> float:
        """The time in seconds, of the clock by which this runner carries out flows. Only differences mean anything."""
        return time.perf_counter()

    def flow_of(self, exchange: Callable[..., Flow[T]], *given: Any) -> Flow[T]:
        """The flow of an algorithm's exchange. One that does the same may take its place."""
        return exchange(*given)

    @abstractmethod
    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        """Queue a flow on a data lane, or on ``CONTROL``. Every rank submits the same flows in the same order.

        ``prompt``: see ``Algorithm.prompt``; either all flows that are under way on data lanes are, or none is.
        """

    @abstractmethod
    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        """The result of a flow; raises what went wrong, with operation, bucket, peers and step named.

        ``meanwhile``: called again and again until it is there; it returns whether it got on with something.
        """

    def arrived(self, ticket: Ticket[Any]) -> bool:
        """Whether a flow has ended, well or not: whether :meth:`wait` returns immediately."""
        return ticket.wait(0.0)

    def run(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = CONTROL) -> T:
        """Submit a flow and wait for it."""
        return self.wait(self.submit(make_flow, label, lane))

    def meet(self, call: str, answer: Callable[[], bool] | None = None) -> None:
        """Wait until every rank has made this ``call`` of a replica, before it sends anything. Collective.

        ``answer``: called while others are not here; it takes part in an exchange that they may wait for, and returns whether
        it did.

        Raises:
            UsageError: another rank is in another call, or in an exchange that this rank has not come to.
        """
        if answer is not None:
            self.wait(self.submit(lambda: maximum(torch.zeros(1), self.world), call, CONTROL), answer)

    def awaited(self, call: str) -> bool:
        """Inside :meth:`meet` of this call: whether another rank is known to wait in an exchange, so that it will not come."""
        return False

    def let_peers_leave(self) -> None:  # noqa: B027  (a world of one has no peers)
        """This rank is about to leave, too: from now on that another one has left is told to no other rank."""

    @abstractmethod
    def meters(self) -> list[Meter]:
        """The counters of every lane."""

    def alarm(self, message: str) -> None:  # noqa: B027  (a world of one has nobody to tell)
        """Tell the other ranks that this one failed, so that none of them waits for it."""

    def agree_on_opening(  # noqa: B027  (a world of one has nobody to tell)
        self, what: str = "gossamer.replicate()", devices: Collection[torch.device] = ()
    ) -> None:
        """Meet the other ranks, who have called ``what`` as well, before the first exchange.

        ``devices``: where the tensors lie that go on data lanes; without any, only the control lane is opened.
        """

    def let_ranks_part(self) -> None:  # noqa: B027  (most know of no other rank's flows)
        """From now on ranks may be at different steps: flows of one number need not be the same one."""

    def note_writer(self) -> None:  # noqa: B027  (without streams there is one order)
        """On a device: the current stream has written into what is going to be submitted, perhaps from another stream."""

    def close(self, graceful: bool = True) -> None:  # noqa: B027  (a world of one has nobody to tell)
        """Leave. Ranks that still wait for this one are told; after an alarm (not ``graceful``) they have been."""


@contextmanager
def alarming(runner: Runner) -> Iterator[None]:
    """Tell the other ranks about an error of this rank's own."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception as error:
        runner.alarm(in_words(runner.rank, error))
        raise


def give_up(runner: Runner, error: BaseException) -> None:
    """Leave because of an error, which the other ranks are told of."""
    runner.alarm(in_words(runner.rank, error))
    runner.close(graceful=False)


def in_words(rank: int, error: BaseException) -> str:
    """The text of an alarm. Errors of gossamer name their rank by themselves."""
    if isinstance(error, GossamerError):
        return str(error)
    return f"rank {rank}: {type(error).__name__}: {error}".removesuffix(": ")
