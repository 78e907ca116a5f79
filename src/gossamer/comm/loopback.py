"""Loopback: ranks inside one process, without a network: one by itself, or many.

Of many, each has a thread, exactly one of them running at a time. Another one runs only where a rank waits for others, and
the state of the random number generators travels with it, so a run is deterministic and each rank draws the numbers
it would draw in a process of its own. Ranks that disagree raise immediately; ranks that wait for each other in vain, too.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.comm.generators import Generators
from gossamer.comm.loopback_world import Meeting, World
from gossamer.comm.operations import alone
from gossamer.comm.ops import Decide, Flow, Group, Op, Port, shown
from gossamer.comm.runner import Meter, Runner, Ticket
from gossamer.errors import PeerLeftError

T = TypeVar("T")

_here = threading.local()


class LocalPort:
    """A port for a world of one: every operation is its own result."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def start(self, op: Op, group: Group | None = None) -> Op:
        self._meter.count(op, 1)
        return op

    def wait(self, handle: Op) -> Tensor:
        return alone(handle)

    def decide(self, decision: Decide) -> Any:
        return decision.fn()


class InlineRunner(Runner):
    """Runs every flow to its end where it is submitted: for a world of one, and the base of the loopback runner."""

    def __init__(self, port: Port, meter: Meter, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world, self.lanes = rank, world, 1
        self._port, self._meter = port, meter
        self._submitted = 0

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        ticket: Ticket[T] = Ticket(self._submitted, label)
        self._submitted += 1
        begin = self.now()
        ticket.carry_out(make_flow, self._port)
        self._meter.busy_seconds += self.now() - begin
        if ticket.error is not None and not isinstance(ticket.error, PeerLeftError):
            raise ticket.error
        return ticket

    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        if ticket.error is not None:  # of a rank that has left: told where the result is needed, as in real processes
            raise ticket.error
        with shown("wait", ticket.label):
            return ticket.result  # type: ignore[return-value]

    def meters(self) -> list[Meter]:
        return [self._meter]


def solo_runner() -> InlineRunner:
    """The runner of a world of one, with or without an initialised process group."""
    meter = Meter()
    return InlineRunner(LocalPort(meter), meter)


class LoopbackPort:
    """One runner's channel of one rank."""

    def __init__(self, world: World, rank: int, meter: Meter) -> None:
        self.label = ""
        self._world, self._rank, self._meter = world, rank, meter
        self.channel = world.open_channel(rank)
        self._everyone = tuple(range(world.size))
        self._counts: Counter[Group] = Counter()

    def start(self, op: Op, group: Group | None = None) -> Meeting:
        group = self._everyone if group is None else group
        self._meter.count(op, len(group), group.index(self._rank))
        self._counts[group] += 1
        return self._world.bring(self._rank, (self.channel, group, self._counts[group]), op, self.label)

    def wait(self, handle: Meeting) -> Tensor:
        return self._world.take(self._rank, handle)

    def decide(self, decision: Decide) -> Any:
        return decision.fn()


class LoopbackRunner(InlineRunner):
    """The runner of one rank of a loopback world."""

    def __init__(self, world: World, rank: int) -> None:
        meter = Meter()
        self._world = world
        self._loopback_port = LoopbackPort(world, rank, meter)
        super().__init__(self._loopback_port, meter, rank, world.size)

    def meet(self, call: str, answer: Callable[[], bool] | None = None) -> None:
        self._world.meet(self.rank, (self._loopback_port.channel, call), answer)
        super().meet(call, answer)  # all are here: what it sends elsewhere counts here, too

    def awaited(self, call: str) -> bool:
        return True

    def close(self, graceful: bool = True) -> None:
        self._world.leave(self.rank, self._loopback_port.channel)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        self._loopback_port.label = label
        return super().submit(make_flow, label, lane)


def current_runner() -> LoopbackRunner | None:
    """A new runner for the rank that this thread is, or None outside of a loopback run."""
    place = getattr(_here, "place", None)
    return None if place is None else LoopbackRunner(*place)


def loopback(fn: Callable[[int], T], world: int) -> list[T]:
    """Run ``fn(rank)`` for every rank of a world inside this process and return the results in order of rank.

    Inside ``fn``, :func:`gossamer.replicate` joins the loopback world: convergence of many workers on one machine,
    deterministic, without processes. Raises the first error that any rank raised.
    """
    ranks = World(world)
    results: list[Any] = [None] * world
    before, cores = Generators.now(), torch.get_num_threads()

    def body(rank: int) -> None:
        _here.place = (ranks, rank)
        torch.set_num_threads(cores)  # each thread has a setting of its own, and sums depend on it
        error: BaseException | None = None
        try:
            ranks.enter(rank)
            if ranks.failure is None:
                results[rank] = fn(rank)
        except BaseException as caught:
            error = caught
        ranks.finish(rank, error)

    threads = [threading.Thread(target=body, args=(rank,), name=f"rank-{rank}", daemon=True) for rank in range(world)]
    _join(threads, ranks)
    before.put()
    if ranks.failure is not None:
        raise ranks.failure
    return results


def _join(threads: list[threading.Thread], world: World) -> None:
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    except BaseException as error:
        world.stop(error)
        raise
