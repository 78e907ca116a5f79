"""Torch runner: the real thing, over whatever backend the user's process group has."""

import hashlib
import secrets
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossamer.comm import torch_departure
from gossamer.comm.bulletin import Bulletin, Store, StoreLostError, attempt
from gossamer.comm.device import Device
from gossamer.comm.flow import Port
from gossamer.comm.links import Links, described
from gossamer.comm.nodes import here, nodes_from
from gossamer.comm.ops import Flow, Group, all_gather
from gossamer.comm.patience import SLICE, Opening, Patience, seconds_of
from gossamer.comm.runner import CONTROL, Meter, Runner, Ticket
from gossamer.comm.shaper import shaper_from_environment
from gossamer.comm.sockets import cut
from gossamer.comm.torch_device import DevicePort, StagedPort
from gossamer.comm.torch_groups import (
    Ended,
    Groups,
    Transport,
    address_among,
    group_timeout,
    interfaces,
    ranks_of,
    same_everywhere,
    told,
    transport_for,
)
from gossamer.comm.torch_ports import Circle, GlooPort
from gossamer.comm.torch_store import board_store, default_store
from gossamer.comm.torch_watch import Issued, Watch
from gossamer.errors import CommunicationError, ConfigurationError, GossamerError
from gossamer.lanes import PromptTicket, StreamLanes, ThreadLanes

T = TypeVar("T")

_OPENING = -1
"""Stands for the opening of process groups among the flows under way."""


def initialised() -> bool:
    """Whether the script has made a process group."""
    return dist.is_available() and dist.is_initialized()


class TorchRunner(Runner):
    """Flows over ``torch.distributed``: lanes with process groups of their own, and patience with a limit.

    ``lanes`` data lanes and one control lane. Waiting never hangs: a failed rank's alarm is raised within about a
    second, a lost connection at once, a late rank is named after ten seconds and is an error after ``timeout``.
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
        self._submitted = 0
        self._under_way: dict[int, Ticket[Any]] = {}
        self._closed, self._alarmed = False, False
        self._failure: GossamerError | None = None
        try:
            self._store = board_store()
            self._name = _instance_name(self._store, self._ranks, self.rank)
        except StoreLostError as error:
            raise CommunicationError(f"the key-value store of the process group is lost: {error}") from error
        self._origin_store: Any = default_store()  # until this is closed: its end is told there
        self._board = Bulletin(self._store, self._ranks, self.rank, self._name)
        self._groups = Groups(self._store, self._name, self._ranks, self.rank)
        self._device: Device | None = None
        self._port: DevicePort | None = None
        self._watch: Watch | None = None
        self._meters = [Meter() for _ in range(self.lanes + 1)]
        self._shaper = shaper_from_environment()
        self._control: ThreadLanes | None = None
        self._data: ThreadLanes | StreamLanes | None = None
        torch_departure.register(self)
        try:
            seconds = seconds_of(timeout, group_timeout(self._group))
        except ConfigurationError as error:
            self.alarm(f"rank {self.rank}: {error}")
            raise
        # A host that is no member may end when it likes.
        self._patience = Patience(self._board, self.rank, seconds, self._store.host_rank in (None, *self._ranks))

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(self._ranks)

    def agree_on_opening(self, what: str = "gossamer.replicate()", devices: Collection[torch.device] = ()) -> None:
        """Meet the other ranks, then make the lanes' process groups (each warmed by one collective)."""
        transport = transport_for(self._group, devices, self.rank)
        device = self._device = transport.device
        self._arrive(what)
        control, data = self._meters[self.lanes :], self._meters[: self.lanes]
        self._control = self._beside(lambda: self._open_threads(control, device), what)
        self._agree(transport)
        if device is not None and transport.streams:
            self._data = self._open_streams(device, what)
        elif devices:
            self._data = self._beside(lambda: self._open_threads(data, device), what)
        self._find_links()

    def _arrive(self, what: str) -> None:
        """Wait for the other ranks, and choose the address at which this host listens for them."""
        ended = Ended(self._group, self._ranks)
        self._group = None  # what its owner destroys is to end then
        try:
            self._board.arrive(self._patience.timeout, what, self._store.address, ended)
            self._groups.address = address_among(self._store.address, self._board.addresses())
        except StoreLostError as error:
            raise CommunicationError(f"rank {self.rank}: {what}: the key-value store is lost: {error}") from error
        where = f"at {', '.join(interfaces()) or self._groups.address or 'the address of its name'}"
        self._patience.opening_hint = (
            f"; rank {self.rank} listens for the others {where}: if they cannot reach it there, name the network interface "
            "that they can reach by GLOO_SOCKET_IFNAME on every rank"
        )

    def _agree(self, transport: Transport) -> None:
        """Learn which ranks share a machine, and the secret of this run, which is what all ranks have drawn.

        It travels over the connections between the ranks, and never lies in the store, where others could read it.
        """
        drawn = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.int64)
        mine = torch.cat([drawn, here(self._machine), told(transport)])
        everyone = self.run(lambda: all_gather(mine), "the search for machines")
        self._board.seal(hashlib.sha256(everyone[:, :4].contiguous().numpy().tobytes()).digest())
        self.nodes = nodes_from(everyone[:, 4:5])
        same_everywhere(everyone[:, 5:], self.rank)

    def _find_links(self) -> None:
        """Learn which connection leads to which rank."""
        own = self._groups.connections
        mine = described(own, 2 * (self.lanes + 1) * self.world)
        everyone = self.run(lambda: all_gather(mine), "the search for connections")
        self._patience.links = Links.found(own, everyone, self.rank)

    def _beside(self, work: Callable[[], T], what: str) -> T:
        """What ``work``, which waits for other ranks, returns. On a thread: this one listens for alarms and for Ctrl-C."""
        ticket: Ticket[T] = Opening(self._submitted, what)
        ticket.doing = "making connections"
        self._under_way[_OPENING] = ticket

        def body() -> None:
            try:
                ticket.result = work()
            except BaseException as error:
                ticket.error = error
            ticket.done.set()

        threading.Thread(target=body, name="gossamer-opening", daemon=True).start()
        result = self.wait(ticket)
        del self._under_way[_OPENING]
        return result

    def _open_threads(self, meters: list[Meter], device: Device | None) -> ThreadLanes:
        return ThreadLanes([self._open_port(meter, device) for meter in meters], meters, device)

    def _open_port(self, meter: Meter, device: Device | None) -> Port:
        open_circle = self._groups.gloo(self._patience.timeout)
        everyone = open_circle(tuple(range(self.world)))
        if device is None:
            return GlooPort(everyone, open_circle, meter, self._shaper)
        return StagedPort(everyone, open_circle, meter, self._shaper, device)

    def _open_streams(self, device: Device, what: str) -> StreamLanes:
        if self._shaper is not None:
            raise ConfigurationError(
                f"rank {self.rank}: the lab has gossamer's runner keep a rate or a latency, which it cannot on NCCL, where the "
                'host waits for nothing: move tensors by Gloo (init_process_group("gloo")), or have the kernel keep the rate '
                "(--shaping namespaces, without --latency where it has no netem)"
            )
        open_circle = self._groups.on_device(self._patience.timeout, device)

        def open_beside(members: Group) -> Circle:
            return self._beside(lambda: open_circle(members), f"{what}: NCCL among ranks {list(members)}")

        self._port = DevicePort(open_beside(tuple(range(self.world))), open_beside, self._meters[0])
        self._watch = Watch(self._patience, device, self._fail)
        return StreamLanes(self._port, device, self.lanes)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        self._check_usable()
        self._patience.active()
        lanes = self._control if lane == CONTROL else self._data
        assert lanes is not None, "agree_on_opening() comes first"
        if prompt and self._device is None and isinstance(lanes, ThreadLanes):
            started: PromptTicket[T] = PromptTicket(self._submitted, label)
            self._note(started)
            lanes.begin(started, make_flow, lane)
            return started
        ticket: Ticket[T] = Ticket(self._submitted, label)
        self._note(ticket)
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
        self._patience.in_step = False

    def note_writer(self) -> None:
        if self._device is not None:
            self._device.note_writer()

    def _note(self, ticket: Ticket[Any]) -> None:
        self._under_way[self._submitted] = ticket
        self._submitted += 1

    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        if not ticket.wait(0.0):
            self._check_usable()
            self._wait_for(ticket, meanwhile)
        if ticket.error is not None:
            raise self._fail(self._failure or self._patience.explain(self._origin(ticket))) from ticket.error
        self._under_way.pop(ticket.sequence, None)
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
            ended = self._patience.wait(ticket, self._broken, meanwhile)
        except GossamerError as error:
            raise self._fail(error) from error.__cause__
        if ended is not ticket:
            raise self._fail(self._patience.explain(self._origin(ended))) from ended.error

    def _broken(self) -> Ticket[Any] | None:
        """A flow that has failed while another is waited for: the lanes are independent, so that one may never end."""
        return next((t for t in self._under_way.values() if t.failed), None)

    def _origin(self, ticket: Ticket[Any]) -> Ticket[Any]:
        """The flow in which an error arose that also ended ``ticket``, which was queued behind it."""
        return next((t for t in self._under_way.values() if t.error is ticket.error and t.begun), ticket)

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
        for ticket in self._under_way.values():
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
            self._board.leave(self._submitted)

    def depart(self, reason: str) -> None:
        """The process ends: tell those who wait for it; with the error that ends it, if one does."""
        if self._closed or self.world == 1:
            return
        if reason:
            self.alarm(f"the process of rank {self.rank} ended with {reason}")
            cut(self._groups.connections)
        elif self._failure is None:
            self._finish_what_is_under_way()
            self._leave()
            if any(isinstance(ticket, PromptTicket) and not ticket.wait(0.0) for ticket in self._under_way.values()):
                cut(self._groups.connections)  # the end of their process groups would wait for them

    def _finish_what_is_under_way(self) -> None:
        """Let other ranks have the messages that were promised to them, if that does not take long."""
        end = time.monotonic() + torch_departure.LINGER
        for ticket in list(self._under_way.values()):
            ticket.wait(max(0.0, end - time.monotonic()))
            while not self.arrived(ticket) and time.monotonic() < end:
                time.sleep(0.01)

    def is_stuck(self) -> bool:
        """Whether a lane still waits for the network."""
        try:
            return any(not self.arrived(ticket) for ticket in list(self._under_way.values()))
        except Exception:  # the device itself has failed: nothing more comes from there
            return False

    def is_needed(self) -> bool:
        """Whether other ranks read the board in a store that ends with this process."""
        if not self._store.hosted or self.world == 1:
            return False
        try:
            return not self._board.heard_by_all()
        except Exception:  # there is no store any more: nobody can read it
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
        self.alarm(str(error))
        for lanes in (self._control, self._data):
            if lanes is not None and lanes.error is None:
                lanes.error = error
        self._groups.abort()
        # Gloo has no way to end a wait. Without this the lanes would wait on, and so would the other ranks for a while.
        cut(self._groups.connections)
        return error


def _instance_name(store: Store, ranks: tuple[int, ...], rank: int) -> str:
    """A name for this replica that all of its ranks compute alike: the group, and how many replicas it had before.

    Counted in the store, which is as old as the process group; some of the processes may have been in others before.
    """
    spelled = f"{ranks[0]}-{ranks[-1]}-{len(ranks)}-{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    if len(ranks) == 1:  # nobody to differ from
        return f"{spelled}/1"
    return f"{spelled}/{store.add(f'gossamer/attempt-{attempt()}/instances/{spelled}/{rank}', 1)}"
