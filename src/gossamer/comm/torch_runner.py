"""Torch runner: the real thing, over whatever backend the user's process group has."""

import atexit
import logging
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from gossamer.comm.bulletin import WARN_AFTER, Bulletin, default_timeout, names
from gossamer.comm.ops import Flow
from gossamer.comm.runner import CONTROL, Meter, Runner, Ticket
from gossamer.comm.shaper import shaper_from_environment
from gossamer.comm.torch_ports import DevicePort, GlooPort
from gossamer.errors import CommunicationError, CommunicationTimeout, ConfigurationError, GossamerError
from gossamer.lanes import StreamLanes, ThreadLanes

T = TypeVar("T")

logger = logging.getLogger("gossamer")

SLICE = 0.2
"""Seconds for which the main thread waits at a time, so that Ctrl-C works and other ranks' alarms are heard."""

_open_runners: "weakref.WeakSet[TorchRunner]" = weakref.WeakSet()
_instances: dict[int, int] = {}


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
        group = dist.group.WORLD if group is None else group
        if dist.get_rank(group) < 0:
            raise ConfigurationError("this process is not a member of the given group: do not call replicate() on it")
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        self._ranks = dist.get_process_group_ranks(group)
        self._group = group
        self.timeout = default_timeout(timeout, group_timeout(group))
        if self.timeout <= 0:
            raise ConfigurationError(f"timeout must be positive; got {self.timeout:g} s")
        self._submitted = 0
        self._closed = False
        self._name, self._groups = _instance_name(self._ranks), 0
        self._board = Bulletin(_store(), self.rank, self.world, self._name)
        self._meters = [Meter() for _ in range(self.lanes + 1)]
        self._shaper = shaper_from_environment()
        self._control: ThreadLanes | None = None
        self._data: ThreadLanes | StreamLanes | None = None
        self._failure: GossamerError | None = None
        _open_runners.add(self)

    @property
    def members(self) -> tuple[int, ...]:
        """The global ranks of the group."""
        return tuple(self._ranks)

    def agree_on_opening(self) -> None:
        """Meet the other ranks, then make the lanes' process groups (each warmed by one collective)."""
        self._board.arrive(self.timeout, "gossamer.replicate()")
        # The groups' own timeout is only the last resort: the main thread's patience ends first.
        patience = timedelta(seconds=self.timeout + 60)
        self._control = self._open_threads(patience, self._meters[self.lanes :])
        if dist.get_backend(self._group) == "nccl":
            self._data = self._open_streams(patience)
        else:
            self._data = self._open_threads(patience, self._meters[: self.lanes])

    def _gloo(self, patience: timedelta) -> Any:
        """A group of our own over the same ranks.

        Not ``dist.new_group``: that names a group after how many the process has already, which differs between ranks
        whenever one of them belongs to a group that another does not, and then waits for itself for ever.
        """
        self._groups += 1
        store = dist.PrefixStore(f"gossamer/{self._name}/gloo/{self._groups}", _store())  # type: ignore[attr-defined]
        group: Any = dist.ProcessGroupGloo(store, self.rank, self.world, patience)
        group.allreduce([torch.zeros(1)]).wait()  # the first message of a group can involve all ranks
        return group

    def _open_threads(self, patience: timedelta, meters: list[Meter]) -> ThreadLanes:
        ports: list[Any] = [GlooPort(self._gloo(patience), self._gloo(patience), meter, self._shaper) for meter in meters]
        return ThreadLanes(ports, meters)

    def _open_streams(self, patience: timedelta) -> StreamLanes:
        device = torch.device("cuda", torch.cuda.current_device())
        group = dist.new_group(self._ranks, patience, "nccl", use_local_synchronization=True)
        dist.all_reduce(torch.zeros(1, device=device), group=group)
        return StreamLanes(DevicePort(group, self._meters[0]), device, self.lanes)

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0) -> Ticket[T]:
        self._check_usable()
        assert self._control is not None, "agree_on_opening() comes first"
        assert self._data is not None
        ticket: Ticket[T] = Ticket(self._submitted, label)
        self._submitted += 1
        if lane == CONTROL:
            self._control.submit(ticket, make_flow, 0)
        else:
            self._data.submit(ticket, make_flow, lane)
        return ticket

    def wait(self, ticket: Ticket[T]) -> T:
        if not ticket.done.is_set():
            self._wait_in_slices(ticket)
        if ticket.error is not None:
            raise self._explain(ticket) from ticket.error
        if isinstance(self._data, StreamLanes):
            self._data.order(ticket)
        return ticket.result  # type: ignore[return-value]

    def meters(self) -> list[Meter]:
        return self._meters

    def alarm(self, message: str) -> None:
        if self.world > 1:
            self._board.alarm(message)

    def close(self, graceful: bool = True) -> None:
        if self._closed:
            return
        self._closed = True
        _open_runners.discard(self)
        if self.world > 1 and self._failure is None:
            self._board.leave(self._submitted)
        for lanes in (self._control, self._data):
            if lanes is not None:
                lanes.close()

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closed:
            raise CommunicationError(f"rank {self.rank}: the replica is closed")

    def _wait_in_slices(self, ticket: Ticket[Any]) -> None:
        begin, next_look, warned = time.monotonic(), 1.0, False
        while not ticket.done.wait(SLICE):
            waited = time.monotonic() - begin
            if waited >= self.timeout:
                raise self._fail(CommunicationTimeout(self._timeout_text(ticket)))
            if waited >= next_look:
                next_look += 1.0
                self._look_at_board(ticket)
            if waited >= WARN_AFTER and not warned:
                warned = True
                self._warn(ticket, waited)

    def _look_at_board(self, ticket: Ticket[Any]) -> None:
        try:
            self._board.check(ticket.sequence, str(ticket))
        except GossamerError as error:
            if not ticket.done.wait(SLICE):
                raise self._fail(error) from None
        except Exception as error:
            raise self._fail(self._store_lost(ticket, error)) from error

    def _store_lost(self, ticket: Ticket[Any], error: Exception) -> CommunicationError:
        return CommunicationError(
            f"rank {self.rank} waits in {ticket}, and the key-value store (on the host of rank 0, or the launcher) "
            f"no longer answers: {first_line(error)}"
        )

    def _warn(self, ticket: Ticket[Any], waited: float) -> None:
        late = self._board.late(ticket.sequence)
        if not ticket.done.is_set():
            who = f"late: {names(late)}" if late else "every rank waits: the network is slow, or stuck"
            logger.warning("rank %d has waited %.0f s in %s (%s)", self.rank, waited, ticket, who)

    def _timeout_text(self, ticket: Ticket[Any]) -> str:
        try:
            late = self._board.late(ticket.sequence)
        except Exception:
            late = []
        who = f"; late: {names(late)}" if late else ""
        return f"rank {self.rank} gave up after {self.timeout:g} s in {ticket}{who}"

    def _explain(self, ticket: Ticket[Any]) -> GossamerError:
        """The error to raise on the main thread for a flow that failed in its lane."""
        error = ticket.error
        if self._failure is not None:
            return self._failure
        if isinstance(error, GossamerError):
            return self._fail(error)
        if not is_connection_error(error):
            return self._fail(CommunicationError(f"rank {self.rank}: {ticket} failed: {error!r}"))
        return self._fail(self._lost(ticket, error))

    def _lost(self, ticket: Ticket[Any], error: BaseException | None) -> GossamerError:
        """Why a connection was lost: what a failing or leaving rank has posted, or else who no longer answers."""
        text = f"rank {self.rank}: connection lost in {ticket}"
        try:
            self._board.check(ticket.sequence, str(ticket))
            missing = self._board.roll_call()
            text += f"; no longer answering: {names(missing)}" if missing else "; every rank still answers"
        except GossamerError as reason:
            return reason
        except Exception:
            text += "; nor does the key-value store answer (on the host of rank 0, or the launcher)"
        return CommunicationError(f"{text} ({first_line(error)})")

    def _fail(self, error: GossamerError) -> GossamerError:
        self._failure = error
        self.alarm(str(error))
        for lanes in (self._control, self._data):
            if lanes is not None and lanes.error is None:
                lanes.error = error
        return error


def group_timeout(group: Any) -> timedelta:
    """The timeout with which a process group was made."""
    try:
        timeout: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    except (AttributeError, RuntimeError):
        return timedelta(minutes=30 if dist.get_backend(group) != "nccl" else 10)
    return timeout


def is_connection_error(error: BaseException | None) -> bool:
    """Whether the transport, not an algorithm, raised this."""
    text = str(error)
    return isinstance(error, RuntimeError) and any(
        mark in text for mark in ("gloo", "onnection", "NCCL", "ncclRemote", "ocket", "Timed out", "timed out")
    )


def first_line(error: BaseException | None) -> str:
    """The first line of an error's text."""
    return str(error).strip().split("\n")[0][:200]


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def _instance_name(ranks: list[int]) -> str:
    """A name for this replica that all of its ranks compute alike: the group, and how many replicas it had before."""
    key = hash(tuple(ranks))
    _instances[key] = _instances.get(key, 0) + 1
    spelled = f"{ranks[0]}-{ranks[-1]}-{len(ranks)}-{sum(r * r for r in ranks)}"
    return f"{spelled}/{_instances[key]}"


@atexit.register
def _leave_all() -> None:
    """Tell ranks that still wait that this process has ended."""
    for runner in list(_open_runners):
        runner.close(graceful=False)
