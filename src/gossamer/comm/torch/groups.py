"""Groups: the user's process group, and the process groups of our own.

Note [groups of our own] are made directly on a prefix of the store. ``torch.distributed.new_group`` names a group after how
many the process has already, which differs between ranks where one belongs to a group that another does not. torch's list does
not have them, so ports call them themselves. On Gloo a lane has two, one per direction: a pair that exchanges over one
connection reaches half of the link's rate. Among p ranks that is 6·(p − 1) connections per process. Groups of one direction
share a device, because each device has a thread that wakes a hundred times a second.
"""

import ipaddress
import math
import os
import threading
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gossamer.comm.device import Device
from gossamer.comm.ops import Group
from gossamer.comm.torch import sockets
from gossamer.comm.torch.attempts import attempt
from gossamer.comm.torch.gloo import Circle
from gossamer.comm.torch.sockets import Connection, connections, keep_alive, round_trip, visible, with_limit
from gossamer.comm.torch.store import QuietStore, default_store
from gossamer.comm.torch.transport import backend_for
from gossamer.errors import ConfigurationError


def initialised() -> bool:
    """Whether the script has made a process group."""
    return dist.is_available() and dist.is_initialized()


def world_group() -> Any:
    """The default process group."""
    return dist.group.WORLD


def part_of(ranks: Sequence[int], processes: int) -> int | None:
    """The number of a group among all that share out ``processes`` as a dimension of a mesh does; None if it has all of
    them. The same for the same part of a model, however many ranks each has. Of a group that is no such row: its first rank."""
    if len(ranks) == processes:
        return None
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if list(ranks) != list(range(ranks[0], ranks[-1] + 1, step)) or step < 1:
        return ranks[0]
    whole, place = divmod(ranks[0], step * len(ranks))
    return whole * step + place % step


def ranks_of(group: Any) -> tuple[int, ...]:
    """The global ranks of a group that this process belongs to."""
    if group is dist.GroupMember.NON_GROUP_MEMBER or (isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
        raise ConfigurationError("this process is not a member of the given group: do not call replicate() on it")
    if not isinstance(group, dist.ProcessGroup):
        raise ConfigurationError(f"group= takes a process group of torch.distributed; got {group!r}")
    return tuple(dist.get_process_group_ranks(group))


def group_timeout(group: Any) -> timedelta:
    """The timeout with which a process group was made."""
    for kind in (pair.split(":")[0] for pair in dist.get_backend_config(group).split(",")):
        try:
            timeout: timedelta = group._get_backend(torch.device(kind)).options._timeout
        except (AttributeError, RuntimeError):
            continue
        return timeout
    return timedelta(minutes=30)


def last_resort(timeout: float) -> int:
    """Seconds after which Gloo itself ends a wait in exchanges that may take ``timeout``: longer than any of them waits.

    Gloo counts from where a wait begins; the main thread's wait may begin anew in the midst of it (``lag=``), and is what
    ends it, by cutting connections. Only where those cannot be found Gloo has to, a bit later.
    """
    return max(math.ceil(timeout + _SPARE), _A_WEEK if visible() else 0)


_SPARE = 60.0
_A_WEEK = 7 * 24 * 3600 + 1
"""And a second: no other library is likely to give its sockets the same limit."""


class Groups:
    """Makes process groups of our own, on a prefix of the store: named alike by those who are in them, and by nobody else.

    Not ``dist.new_group``: that names a group after how many the process has already, which differs between ranks
    whenever one of them belongs to a group that another does not, and then waits for itself for ever.
    """

    def __init__(self, store: QuietStore, name: str, ranks: Group, rank: int) -> None:
        """``rank``: this one's place among ``ranks``, which are global."""
        self.address = ""
        """Where this host listens for the other ranks; empty: where torch would, which goes by the host's name."""
        self.connections: frozenset[Connection] = frozenset()
        """Those of the groups on Gloo: what has to be cut to end a wait."""
        self._store, self._name, self._ranks, self._rank = store, name, ranks, rank
        self._devices: dict[str, list[Any]] = {}
        self._on_devices: list[Any] = []
        self._opened = 0

    def gloo(self, timeout: float) -> Callable[[Group], Circle]:
        """What makes the groups of one lane on Gloo, by the indices of their members, for exchanges of ``timeout`` seconds."""
        self._opened += 1
        # A group holds its store; one that is hosted here is to end with the user's process group.
        number, stores = self._opened, [] if self._store.hosted else [default_store()]
        limit = last_resort(timeout)

        def open_circle(members: Group) -> Circle:
            # Later, lanes open groups side by side; a thread that waits for a key blocks every other call on a connection.
            store = stores.pop() if stores else self._store.clone()
            name = f"{number}/{','.join(map(str, members))}"
            known = self.connections
            up, down = (self._gloo(limit, store, f"{name}/{way}", members, way) for way in ("up", "down"))
            rtt = round_trip(self.connections - known)
            return Circle(up, down, members, near=rtt is not None and rtt < _NEAR)

        return open_circle

    def _gloo(self, limit: int, store: Any, name: str, members: Group, way: str) -> Any:
        """A group over ``members`` for messages that go one ``way``."""
        before = connections()
        options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        # All groups of one way share their devices: each device has a thread that wakes a hundred times a second.
        if way not in self._devices:
            self._devices[way] = _gloo_devices(self.address)
        options._timeout, options._devices = timedelta(seconds=limit), self._devices[way]
        # What the flight recorder calls it; other groups of the process have names that torch counts.
        options.group_name = f"gossamer/{self._name}/gloo/{name}"
        options.global_ranks_in_group = [self._ranks[index] for index in members]
        group: Any = dist.ProcessGroupGloo(self._below(store, f"gloo/{name}"), members.index(self._rank), len(members), options)
        found = connections() - before
        # Another thread may have connected to something else meanwhile. Gloo gives its own limit to every socket it makes.
        own = with_limit(limit, found)
        own = own if len(own) >= len(members) - 1 else found
        keep_alive(own)
        with _counting:  # lanes open groups side by side
            self.connections |= own
        group.allreduce([torch.zeros(1)]).wait()  # the first message of a group can involve all ranks
        return group

    def on_device(self, timeout: float, device: Device) -> Callable[[Group], Circle]:
        """What makes groups on NCCL, by the indices of their members, on a thread of its own: each is warmed, which waits."""
        self._opened += 1
        number, limit = self._opened, timedelta(seconds=timeout + _SPARE)

        def open_circle(members: Group) -> Circle:
            device.enter_thread()
            path = f"nccl/{number}/{','.join(map(str, members))}"
            store, name = self._below(self._store.clone(), path), f"gossamer/{self._name}/{path}"
            rank, ranks = members.index(self._rank), [self._ranks[index] for index in members]
            group = single(store, rank, len(ranks), name, nccl(store, rank, ranks, name, limit), device)
            self._on_devices.append(group)
            _warm(group, len(ranks), device)
            return Circle(group, group, members)

        return open_circle

    def _below(self, store: Any, name: str) -> Any:
        return dist.PrefixStore(f"gossamer/attempt-{attempt()}/{self._name}/{name}", store)  # type: ignore[attr-defined]

    def abort(self) -> None:
        """End whatever a device still does for groups on NCCL, so that nothing waits for it any more."""
        groups, self._on_devices = self._on_devices, []
        for group in groups:
            group.abort()

    def close(self) -> None:
        """Let go of everything. Groups on Gloo end with the lanes that hold them; those on NCCL when their work is done."""
        self._devices.clear()
        for group in list(self._on_devices):
            group.shutdown()
        self._on_devices.clear()


_counting = threading.Lock()

_NEAR = 1e-3
"""Seconds of a round trip up to which messages wait for each other: 256 kB per round trip and a half are 1.4 Gbit/s then."""


def _warm(group: Any, world: int, device: Device) -> None:
    """Have a group on NCCL make its connections, for which the host waits, and which nothing could cut short later on: those of
    collectives, and those of each rank to each other one (where they are not too many), over which single messages go."""
    warm = torch.zeros(1, device=device.device)
    group.allreduce([warm], dist.AllreduceOptions()).wait()
    if world <= _WARM_PAIRS:
        rows = torch.zeros(world, device=device.device)
        group.alltoall_base(torch.empty_like(rows), rows, [], [], dist.AllToAllOptions()).wait()
    warm.item()


_WARM_PAIRS = 16
"""Ranks up to which each is connected with each other one from the start. Connections take memory of the device."""


def nccl(store: Any, rank: int, ranks: list[int], name: str, timeout: timedelta) -> Any:
    """An NCCL backend as ``dist.new_group`` makes it, on a store of our own."""
    kind: Any = dist.ProcessGroupNCCL
    options = kind.Options()
    options._timeout, options.global_ranks_in_group, options.group_name = timeout, ranks, name
    backend = kind(store, rank, len(ranks), options)
    backend._set_sequence_number_for_group()
    return backend


def single(store: Any, rank: int, world: int, name: str, backend: Any, device: Device) -> Any:
    """A process group with one backend, for one kind of device. It is not in torch's own list of groups."""
    group: Any = dist.ProcessGroup(store, rank, world)
    kind = dist.Backend.backend_type_map[backend.name()]
    group._set_default_backend(kind)
    group._register_backend(torch.device(device.device.type), kind, backend)
    group._set_group_name(name)
    group._set_group_desc("gossamer")
    return group


def _gloo_devices(address: str) -> list[Any]:
    """The network interfaces for a Gloo group: the ones that the user names, the one with ``address``, or torch's choice."""
    make = dist.ProcessGroupGloo
    named = [make.create_device(interface=name) for name in interfaces()]
    if named or not address:
        return named or [make.create_default_device()]
    return [make.create_device(hostname=address)]


def interfaces() -> list[str]:
    """The interfaces that the user has named."""
    return [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]


def address_among(own: str, others: Collection[str]) -> str:
    """The address of this host that the other ranks reach, from those by which each rank reaches the store.

    The host of the store may reach it by an address of its own alone (127.0.0.1, or what /etc/hosts has for its name).
    """
    if _is_elsewhere(own):
        return own
    elsewhere = next(filter(_is_elsewhere, sorted(others)), None)
    return own if elsewhere is None else sockets.address_towards(elsewhere) or own


def _is_elsewhere(address: str) -> bool:
    """Whether this is an address that other hosts may reach."""
    try:
        return not ipaddress.ip_address(address).is_loopback
    except ValueError:  # unknown
        return False


class Ended:
    """Tells which ranks of the user's process group have ended, before there are connections of our own to see it by."""

    def __init__(self, group: Any, ranks: Group) -> None:
        """``ranks``: the global ranks that are asked about, in order."""
        lazy = os.environ.get("TORCH_GLOO_LAZY_INIT", "0") not in ("", "0")  # a connection may never have been made
        self._group = group if backend_for(group, "cpu") == dist.Backend.GLOO and not lazy else None
        self._asked = False
        self._ranks, self._places = ranks, dist.get_process_group_ranks(group)
        limit = round(group_timeout(group).total_seconds())
        self._known = with_limit(limit, connections()) if self._group is not None else frozenset()
        keep_alive(self._known)

    def __call__(self, absent: Sequence[int]) -> list[int]:
        """Those of some ranks whose processes have closed their connections."""
        still = frozenset(connection for connection in self._known if sockets.is_open(connection))
        if still == self._known and self._asked:
            return []
        # Some connection has ended, perhaps before we looked, or that of another group: the group itself says whose it was.
        self._known, self._asked = still, True
        return [rank for rank in absent if self._refuses(self._ranks[rank])]

    def _refuses(self, rank: int) -> bool:
        """Whether the group can no longer receive from a rank. Nothing is ever sent to the receive that is posted else."""
        if self._group is None or rank not in self._places:
            return False
        try:
            # Not kept: the work would hold the user's group, which is to end when its owner destroys it.
            self._group.recv([torch.zeros(1, dtype=torch.uint8)], self._places.index(rank), _NEVER_SENT)
        except RuntimeError:
            return True
        return False


_NEVER_SENT = 0x60554D
"""A tag of messages that nobody sends."""
