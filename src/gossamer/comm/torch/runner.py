"""Torch runner: the real thing, over whatever backend the user's process group has."""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossamer.comm.device import Device
from gossamer.comm.ops import Flow, Group, shown
from gossamer.comm.runner import CONTROL, Meter, Runner, Ticket
from gossamer.comm.shaper import shaper_from_environment
from gossamer.comm.torch import opening, process_exit
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.calls import Call
from gossamer.comm.torch.device_ports import DevicePort
from gossamer.comm.torch.gloo import Circle
from gossamer.comm.torch.groups import Ended, Groups, group_timeout, part_of, ranks_of
from gossamer.comm.torch.lanes import PromptTicket, ThreadLanes
from gossamer.comm.torch.opening import instance_name
from gossamer.comm.torch.sockets import cut
from gossamer.comm.torch.store import StoreLostError, board_store, default_store
from gossamer.comm.torch.streams import StreamLanes
from gossamer.comm.torch.transport import transport_for
from gossamer.comm.torch.under_way import UnderWay
from gossamer.comm.torch.waiting import LOOK_EVERY, SLICE, Opening, WaitPolicy, seconds_of
from gossamer.comm.torch.watchdog import Issued, Watchdog
from gossamer.errors import CommunicationError, ConfigurationError, GossamerError, PeerLeftError

T = TypeVar("T")


class TorchRunner(Runner):
    """Flows over ``torch.distributed``: lanes with process groups of their own, and waits with a limit.

    ``lanes`` data lanes and one control lane. Waiting never hangs: a failed rank's alarm is raised within about a
    second, a lost connection immediately, a late rank is named after ten seconds and is an error after ``timeout``.
    """

    lanes = 2

    def __init__(
        self,
        group: Any = None,
        timeout: float | timedelta | None = None,
        machine: int | None = None,
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        """``machine``: the number of this rank's machine, if it is known from elsewhere than the environment.

        ``ranks``: the global ranks that are meant, if not those of ``group``, which then only tells the backends.
        """
        self._group, self._machine = dist.group.WORLD if group is None else group, machine
        self._ranks = ranks_of(self._group) if ranks is None else ranks
        self.rank, self.world = self._ranks.index(dist.get_rank()), len(self._ranks)
        self.part = part_of(self._ranks, dist.get_world_size())
        self._under_way = UnderWay()
        self._closed, self._alarmed, self._leaving, self._calls = False, False, False, 0
        self._ends_at: int | None = None  # the flow from which on this rank takes no part, if that is known before it closes
        self._failure: GossamerError | None = None
        try:
            self._store = board_store(process_exit.linger)
            self._name = instance_name(self._store, self._ranks, self.rank)
        except StoreLostError as error:
            raise CommunicationError(f"the key-value store of the process group is lost: {error}") from error
        self._origin_store: Any = default_store()  # until this is closed: its end is told there
        self._board = FailureBoard(self._store, self._ranks, self.rank, self._name)
        self._groups = Groups(self._store, self._name, self._ranks, self.rank)
        self._device: Device | None = None
        self._port: DevicePort | None = None
        self._watch: Watchdog | None = None
        self._meters = [Meter() for _ in range(self.lanes + 1)]
        self._shaper = shaper_from_environment()
        self._control: ThreadLanes | None = None
        self._data: ThreadLanes | StreamLanes | None = None
        process_exit.register(self)
        try:
            seconds = seconds_of(timeout, group_timeout(self._group))
        except ConfigurationError as error:
            self.alarm(f"rank {self.rank}: {error}")
            raise
        self._asked = 0.0  # when the board was asked last in what others wait
        # A host that is no member may end when it likes.
        self._policy = WaitPolicy(self._board, self.rank, seconds, self._store.host_rank in (None, *self._ranks))

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(self._ranks)

    def meets(self, group: Any) -> bool:
        return len(set(ranks_of(group)) & set(self._ranks)) > 1

    def agree_on_opening(self, what: str = "gossamer.replicate()", devices: Collection[torch.device] = ()) -> None:
        """Meet the other ranks, then make the lanes' process groups (each warmed by one collective)."""
        transport = transport_for(self._group, devices, self.rank)
        device = self._device = transport.device
        ended = Ended(self._group, self._ranks)
        self._group = None  # what its owner destroys is to end then
        opening.arrive(self._board, self._policy, self._groups, self._store.address, ended, what)
        control, data = self._meters[self.lanes :], self._meters[: self.lanes]
        open_threads = partial(opening.threads, self._groups, self._policy.timeout, self.world, self._shaper, device)
        self._control = self._beside(partial(open_threads, control), what)
        self.nodes = opening.agree(self.run, self._board, transport, self._machine)
        if device is not None and transport.streams:
            self._data = self._open_streams(device, what)
        elif devices:
            self._data = self._beside(partial(open_threads, data), what)
        room = 2 * (self.lanes + 1) * self.world
        self._policy.links = opening.links(self.run, self._groups.connections, room, self.rank)

    def _beside(self, work: Callable[[], T], what: str) -> T:
        """What ``work``, which waits for other ranks, returns. On a thread: this one listens for alarms and for Ctrl-C."""
        ticket: Ticket[T] = Opening(self._under_way.submitted, what)
        ticket.doing = "making connections"
        with self._under_way.opening(ticket):
            opening.on_a_thread(ticket, work)
            return self.wait(ticket)

    def _open_streams(self, device: Device, what: str) -> StreamLanes:
        opening.require_unshaped(self._shaper, self.rank)
        open_circle = self._groups.on_device(self._policy.timeout, device)

        def open_beside(members: Group) -> Circle:
            return self._beside(lambda: open_circle(members), f"{what}: NCCL among ranks {list(members)}")

        self._port = DevicePort(open_beside(tuple(range(self.world))), open_beside, self._meters[0])
        self._watch = Watchdog(self._policy, device, self._fail)
        return StreamLanes(self._port, device, self.lanes)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        self._check_usable()
        self._policy.absence.active(self._under_way.submitted)
        lanes = self._control if lane == CONTROL else self._data
        assert lanes is not None, "agree_on_opening() comes first"
        if prompt and self._device is None and isinstance(lanes, ThreadLanes):
            started: PromptTicket[T] = PromptTicket(self._under_way.submitted, label)
            self._under_way.add(started)
            lanes.begin(started, make_flow, lane)
            return started
        ticket: Ticket[T] = Ticket(self._under_way.submitted, label)
        self._under_way.add(ticket)
        if lane == CONTROL or self._watch is None or self._port is None:
            lanes.submit(ticket, make_flow, 0 if lane == CONTROL else lane)
            return ticket
        issued = Issued(ticket)
        self._watch.add(issued)  # before: to issue it may make the host wait for another rank, and nobody else would notice
        try:
            lanes.submit(ticket, make_flow, lane)
        finally:
            issued.follow(ticket.event, self._port.asked())
        return ticket

    def let_ranks_part(self) -> None:
        self._policy.in_step = False

    def let_peers_leave(self) -> None:
        self._leaving = True

    def note_writer(self) -> None:
        if self._device is not None:
            self._device.note_writer()

    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        if not ticket.wait(0.0):
            self._check_usable()
            with shown("wait", ticket.label):
                self._wait_for(ticket, meanwhile)
        if ticket.error is not None:
            raise self._fail(self._failure or self._policy.explain(self._under_way.origin(ticket))) from ticket.error
        self._under_way.remove(ticket)
        self._policy.absence.ended(ticket.sequence)
        if self._device is not None:
            self._order(self._device, ticket)
        return ticket.result  # type: ignore[return-value]

    def _order(self, device: Device, ticket: Ticket[Any]) -> None:
        """Make the current stream of the device wait for a flow; the host goes on."""
        if not self._under_way:
            device.forget_writers()
        if ticket.event is not None:
            device.follow(ticket.event, ticket.result)

    def arrived(self, ticket: Ticket[Any]) -> bool:
        return ticket.wait(0.0) and (ticket.event is None or bool(ticket.event.query()))

    def _wait_for(self, ticket: Ticket[Any], meanwhile: Callable[[], bool] | None = None) -> None:
        try:
            ended = self._policy.wait(ticket, self._under_way.failed, meanwhile)
        except GossamerError as error:
            raise self._fail(error) from error.__cause__
        if ended is not ticket:
            raise self._fail(self._policy.explain(self._under_way.origin(ended))) from ended.error

    def meet(self, call: str, answer: Callable[[], bool] | None = None) -> None:
        if self.world > 1:
            self._check_usable()
            self._calls += 1
            made = Call(self._board, self._under_way.submitted, self._calls, call, self._policy.store_is_vital)
            with shown("wait", call):
                self._wait_for(made, answer)
        super().meet(call, answer)

    def awaited(self, call: str) -> bool:
        now = time.monotonic()
        if now - self._asked < LOOK_EVERY:
            return False
        self._asked = now
        return self._policy.others_wait_elsewhere(call)

    def meters(self) -> list[Meter]:
        return self._meters

    def alarm(self, message: str) -> None:
        self._alarmed = True
        if self.world > 1:
            self._board.alarm(message)

    def close(self, graceful: bool = True) -> None:
        if self._closed:
            return
        self._closed, failed_before = True, self._failure is not None
        if graceful:
            self._leave()
        if self._watch is not None:
            self._watch.close()
            # The groups of a device end when their work is done, however long that takes: so it is waited for here, in slices.
            while graceful and not self._watch.ends(SLICE):
                pass
        for ticket in self._under_way:
            # What holds a process group that is not at rest must be a lane: its end waits for that of its operations.
            if isinstance(ticket, PromptTicket) and isinstance(self._data, ThreadLanes) and not ticket.wait(0.0):
                self._data.take_over(ticket)
        for lanes in (self._control, self._data):
            if lanes is not None:
                lanes.close()
        # The process groups, with their threads and connections, end with the lanes that hold them.
        self._control = self._data = self._port = None
        if not graceful:
            self._groups.abort()
        self._groups.close()
        self._origin_store = None
        if graceful and self._watch is not None and self._failure is not None and not failed_before:
            raise self._failure

    def _leave(self) -> None:
        if self.world > 1 and not self._alarmed:
            self._board.leave(self._under_way.submitted if self._ends_at is None else self._ends_at)

    def depart(self, reason: str) -> None:
        """The process ends: tell those who wait for it; with the error that ends it, if one does."""
        if self._closed or self.world == 1:
            return
        if reason:
            self.alarm(f"the process of rank {self.rank} ended with {reason}")
            cut(self._groups.connections)
        elif self._failure is None:
            self._under_way.finish(self.arrived, process_exit.LINGER)
            self._leave()
            if any(isinstance(ticket, PromptTicket) and not ticket.wait(0.0) for ticket in self._under_way):
                cut(self._groups.connections)  # the end of their process groups would wait for them

    def is_stuck(self) -> bool:
        """Whether a lane still waits for the network."""
        with suppress(Exception):  # the device itself has failed: nothing more comes from there
            return not all(map(self.arrived, self._under_way))
        return False

    def is_needed(self) -> bool:
        """Whether other ranks read the board in a store that ends with this process."""
        with suppress(Exception):  # there is no store any more: nobody can read it
            return self._store.hosted and self.world > 1 and not self._board.heard_by_all()
        return False

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise CommunicationError(f"rank {self.rank}: the replica is closed")

    def _fail(self, error: GossamerError) -> GossamerError:
        if self._failure is not None:
            return self._failure
        self._failure = error
        if self._leaving and isinstance(error, PeerLeftError):
            self._ends_at = self._under_way.first
            self._leave()
        else:
            self.alarm(str(error))
        for lanes in (self._control, self._data):
            if lanes is not None and lanes.error is None:
                lanes.error = error
        self._groups.abort()
        # Gloo has no way to end a wait. Without this the lanes would wait on, and so would the other ranks for a while.
        cut(self._groups.connections)
        return error
