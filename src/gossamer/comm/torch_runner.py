"""Torch runner: the real thing, over whatever backend the user's process group has."""

import os
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossamer.comm import torch_departure
from gossamer.comm.bulletin import Bulletin, StoreLostError
from gossamer.comm.flow import Port
from gossamer.comm.nodes import here, nodes_from
from gossamer.comm.ops import Flow, Group, all_gather
from gossamer.comm.patience import Patience, seconds_of
from gossamer.comm.runner import CONTROL, Meter, Runner, Ticket
from gossamer.comm.shaper import shaper_from_environment
from gossamer.comm.sockets import Connection, connections, cut
from gossamer.comm.torch_ports import Circle, DevicePort, GlooPort
from gossamer.comm.torch_store import QuietStore, board_store
from gossamer.errors import CommunicationError, ConfigurationError, GossamerError
from gossamer.lanes import PromptTicket, StreamLanes, ThreadLanes

T = TypeVar("T")

_instances: dict[tuple[int, ...], int] = {}


def initialised() -> bool:
    """Whether the script has made a process group."""
    return dist.is_available() and dist.is_initialized()


class TorchRunner(Runner):
    """Flows over ``torch.distributed``: lanes with process groups of their own, and patience with a limit.

    ``lanes`` data lanes and one control lane. Waiting never hangs: a failed rank's alarm is raised within about a
    second, a lost connection at once, a late rank is named after ten seconds and is an error after ``timeout``.
    """

    lanes = 2

    def __init__(self, group: Any = None, timeout: float | timedelta | None = None) -> None:
        self._group = dist.group.WORLD if group is None else group
        self._ranks = _ranks_of(self._group)
        self.rank, self.world = dist.get_rank(self._group), len(self._ranks)
        self._submitted, self._ports = 0, 0
        self._devices: dict[str, list[Any]] = {}
        self._under_way: dict[int, Ticket[Any]] = {}
        self._connections: frozenset[Connection] = frozenset()
        self._closed, self._alarmed = False, False
        self._failure: GossamerError | None = None
        self._name = _instance_name(self._ranks)
        self._store = _open_store()
        self._board = Bulletin(self._store, self._ranks, self.rank, self._name)
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
        self._patience = Patience(self._board, self.rank, seconds)

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(self._ranks)

    def agree_on_opening(self, what: str = "gossamer.replicate()") -> None:
        """Meet the other ranks, then make the lanes' process groups (each warmed by one collective)."""
        try:
            self._board.arrive(self._patience.timeout, what)
        except StoreLostError as error:
            raise CommunicationError(f"rank {self.rank}: {what}: the key-value store is lost: {error}") from error
        # The groups' own timeout is only the last resort: the main thread's patience ends first.
        last_resort = timedelta(seconds=self._patience.timeout + 60)
        device = dist.get_backend(self._group) == "nccl"
        self._beside(lambda: self._open_host_lanes(last_resort, data=not device), what)
        if device:
            self._data = self._open_streams(last_resort)
        self.nodes = nodes_from(self.run(lambda: all_gather(here()), "the search for machines"))

    def _beside(self, work: Callable[[], None], what: str) -> None:
        """Do ``work``, which waits for other ranks, on a thread: this one listens for alarms and for Ctrl-C."""
        ticket: Ticket[None] = Ticket(0, what)
        ticket.doing = "making connections"
        self._under_way[0] = ticket

        def body() -> None:
            try:
                work()
            except BaseException as error:
                ticket.error = error
            ticket.done.set()

        threading.Thread(target=body, name="gossamer-opening", daemon=True).start()
        self.wait(ticket)

    def _open_host_lanes(self, last_resort: timedelta, data: bool) -> None:
        self._control = self._open_threads(last_resort, self._meters[self.lanes :])
        if data:
            self._data = self._open_threads(last_resort, self._meters[: self.lanes])

    def _gloo(self, last_resort: timedelta, store: Any, name: str, members: Group, way: str) -> Any:
        """A group of our own over ``members`` (indices of the same ranks) for messages that go one ``way``.

        Not ``dist.new_group``: that names a group after how many the process has already, which differs between ranks
        whenever one of them belongs to a group that another does not, and then waits for itself for ever.
        """
        store = dist.PrefixStore(f"gossamer/{self._name}/gloo/{name}", store)  # type: ignore[attr-defined]
        before = connections()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All groups of one way share their devices: each device has a thread that wakes a hundred times a second.
        if way not in self._devices:
            self._devices[way] = _gloo_devices()
        options._timeout, options._devices = last_resort, self._devices[way]
        group: Any = dist.ProcessGroupGloo(store, members.index(self.rank), len(members), options)
        self._connections |= connections() - before
        group.allreduce([torch.zeros(1)]).wait()  # the first message of a group can involve all ranks
        return group

    def _open_threads(self, last_resort: timedelta, meters: list[Meter]) -> ThreadLanes:
        return ThreadLanes([self._open_port(last_resort, meter) for meter in meters], meters)

    def _open_port(self, last_resort: timedelta, meter: Meter) -> Port:
        self._ports += 1
        number = self._ports
        stores: list[Any] = [self._store.origin]

        def open_circle(group: Group) -> Circle:
            # Later, lanes open groups side by side; a thread that waits for a key blocks every other call on a connection.
            store = stores.pop() if stores else self._store.origin.clone()
            name = f"{number}/{','.join(map(str, group))}"
            up, down = (self._gloo(last_resort, store, f"{name}/{way}", group, way) for way in ("up", "down"))
            return Circle(up, down, group)

        return GlooPort(open_circle(tuple(range(self.world))), open_circle, meter, self._shaper)

    def _open_streams(self, last_resort: timedelta) -> StreamLanes:
        device = torch.device("cuda", torch.cuda.current_device())
        group = dist.new_group(self._ranks, last_resort, "nccl", use_local_synchronization=True)
        dist.all_reduce(torch.zeros(1, device=device), group=group)

        def open_group(members: Group) -> Any:
            return dist.new_group([self._ranks[i] for i in members], last_resort, "nccl", use_local_synchronization=True)

        return StreamLanes(DevicePort(group, open_group, self._meters[0]), device, self.lanes)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        self._check_usable()
        assert self._control is not None, "agree_on_opening() comes first"
        assert self._data is not None
        if prompt and isinstance(self._data, ThreadLanes):
            started: PromptTicket[T] = PromptTicket(self._submitted, label)
            self._note(started)
            self._data.begin(started, make_flow, lane)
            return started
        ticket: Ticket[T] = Ticket(self._submitted, label)
        self._note(ticket)
        if lane == CONTROL:
            self._control.submit(ticket, make_flow, 0)
        else:
            self._data.submit(ticket, make_flow, lane)
        return ticket

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
        if isinstance(self._data, StreamLanes):
            self._data.order(ticket)
        return ticket.result  # type: ignore[return-value]

    def arrived(self, ticket: Ticket[Any]) -> bool:
        return ticket.wait(0.0) and not (isinstance(self._data, StreamLanes) and self._data.pending(ticket))

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
        self._closed = True
        self._leave()
        for ticket in self._under_way.values():
            # What holds a process group that is not at rest must be a lane: its end waits for that of its operations.
            if isinstance(ticket, PromptTicket) and isinstance(self._data, ThreadLanes) and not ticket.wait(0.0):
                self._data.take_over(ticket)
        for lanes in (self._control, self._data):
            if lanes is not None:
                lanes.close()
        # The process groups, with their threads and connections, end with the lanes that hold them.
        self._control = self._data = None
        self._devices.clear()

    def _leave(self) -> None:
        if self.world > 1 and not self._alarmed:
            self._board.leave(self._submitted)

    def depart(self, reason: str) -> None:
        """The process ends: tell those who wait for it; with the error that ends it, if one does."""
        if self._closed or self.world == 1:
            return
        if reason:
            self.alarm(f"the process of rank {self.rank} ended with {reason}")
            cut(self._connections)
        elif self._failure is None:
            self._finish_what_is_under_way()
            self._leave()
            if any(isinstance(ticket, PromptTicket) and not ticket.wait(0.0) for ticket in self._under_way.values()):
                cut(self._connections)  # the end of their process groups would wait for them

    def _finish_what_is_under_way(self) -> None:
        """Let other ranks have the messages that were promised to them, if that does not take long."""
        end = time.monotonic() + torch_departure.LINGER
        for ticket in list(self._under_way.values()):
            ticket.wait(max(0.0, end - time.monotonic()))

    def is_stuck(self) -> bool:
        """Whether a lane still waits for the network."""
        return any(not ticket.wait(0.0) for ticket in list(self._under_way.values()))

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
        # Gloo has no way to end a wait. Without this the lanes would wait on, and so would the other ranks for a while.
        cut(self._connections)
        return error


def _gloo_devices() -> list[Any]:
    """The network interfaces for a Gloo group, chosen as torch does."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    make = dist.ProcessGroupGloo
    return [make.create_device(interface=name) for name in names] or [make.create_default_device()]


def _open_store() -> QuietStore:
    try:
        return board_store()
    except StoreLostError as error:
        raise CommunicationError(f"the key-value store of the process group is lost: {error}") from error


def _ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group that this process belongs to."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
        raise ConfigurationError("this process is not a member of the given group: do not call replicate() on it")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(f"group= takes a process group of torch.distributed; got {group!r}")
    return tuple(dist.get_process_group_ranks(group))


def group_timeout(group: Any) -> timedelta:
    """The timeout with which a process group was made."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=30 if dist.get_backend(group) != "nccl" else 10)
    return timeout


def _instance_name(ranks: tuple[int, ...]) -> str:
    """A name for this replica that all of its ranks compute alike: the group, and how many replicas it had before."""
    _instances[ranks] = _instances.get(ranks, 0) + 1
    spelled = f"{ranks[0]}-{ranks[-1]}-{len(ranks)}-{sum(r * r for r in ranks)}"
    return f"{spelled}/{_instances[ranks]}"
