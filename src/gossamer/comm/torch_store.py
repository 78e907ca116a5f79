"""Store: the key-value store that the process group was made with, asked in a way that prints nothing.

Connections to it are few, and kept: for each new one the server may look up a host name, and serves nobody meanwhile.
"""

import os
import select
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gossamer.comm.bulletin import StoreLostError
from gossamer.comm.sockets import connections

T = TypeVar("T")


class QuietStore:
    """The four operations of ``torch.distributed.Store`` that a bulletin needs.

    A ``TCPStore`` whose host has ended writes pages of stack traces on each call. So the connection is looked at first,
    and a store that was lost once is not asked again.
    """

    def __init__(self, store: Any, own_connection: bool = True) -> None:
        self.origin = self._store = store
        tcp = store
        while isinstance(tcp, PrefixStore):
            tcp = tcp.underlying_store
        port = tcp.port if isinstance(tcp, TCPStore) else None
        # torchrun keeps the store in its agent; elsewhere the process of rank 0 hosts it.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        self.host = "the launcher, which hosts it," if agent else "the process of rank 0, which hosts it,"
        self.hosted = port is not None and not agent and dist.get_rank() == 0
        """Whether this process hosts the store, so that the others lose it when this process ends."""
        before = _connections_to(port)
        self._line, self._lost = _Line(before), False
        if own_connection:
            self._require_line()  # connecting to a host that has ended would go on for minutes
            # A connection of our own, because a thread that waits for a key blocks every other call on the same one.
            self._store = store.clone()
            self._line = _Line(_connections_to(port) - before)

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Read a value that is there."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value.decode(errors="replace")

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._ask(lambda: self._store.check([key])))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def _ask(self, call: Callable[[], T]) -> T:
        self._require_line()
        try:
            return call()
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            self._lost = True
            raise StoreLostError(f"{self.host} no longer answers: {error}") from error

    def _require_line(self) -> None:
        if self._lost or self._line.is_cut():
            self._lost = True
            raise StoreLostError(f"{self.host} has ended, or cannot be reached")


# Linux tells a connection that the other side has closed from one with something to read; elsewhere POLLHUP does.
_CLOSED = vars(select).get("POLLRDHUP", 0)


class _Line:
    """The connections of a store's clients, those that were found."""

    def __init__(self, found: set[int]) -> None:
        self._descriptors = [os.dup(descriptor) for descriptor in found]

    def is_cut(self) -> bool:
        """Whether the other side has gone."""
        poll = select.poll()  # its own: two threads may ask at once
        for descriptor in self._descriptors:
            poll.register(descriptor, _CLOSED)
        return bool(poll.poll(0))

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def _connections_to(port: int | None) -> set[int]:
    """The descriptors of this process that are connected to ``port`` on any host."""
    return set() if port is None else {c.descriptor for c in connections() if c.port == port}


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


_board_store: QuietStore | None = None


def board_store() -> QuietStore:
    """That store, on a connection that all boards of this process share."""
    global _board_store
    store = default_store()
    if _board_store is None or _board_store.origin is not store:
        _board_store = QuietStore(store)
    return _board_store
