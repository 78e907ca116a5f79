"""Store: the key-value store that the process group was made with, asked in a way that prints nothing.

Connections to it are few, and kept: for each new one the server may look up a host name, and serves nobody meanwhile.
"""

import os
import queue
import select
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gossamer.comm.torch.sockets import CLOSED, Connection, connections, keep_alive, local_address

T = TypeVar("T")


class StoreLostError(ConnectionError):
    """The host of the store has ended, or cannot be reached."""


class StoreSilentError(StoreLostError):
    """The host of the store does not answer, and may do so again."""


class Store(Protocol):
    """Where a failure board lives."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> str:
        """Read a value that is there."""

    def values(self, keys: Sequence[str]) -> list[str]:
        """Read several values, empty where there is none."""

    def has(self, key: str) -> bool:
        """Whether there is a value."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""


class QuietStore:
    """The operations of ``torch.distributed.Store`` that a failure board needs.

    A ``TCPStore`` whose host has ended writes pages of stack traces on each call. So the connection is looked at first,
    and a store that was lost once is not asked again.
    """

    def __init__(self, store: Any, own_connection: bool = True, within: float = 10.0) -> None:
        """``within``: seconds that the store may take for an answer."""
        self._store, self._within, self._clerk = store, within, _Clerk()
        self.waited = 0.0
        """Seconds for which answers were waited for; a stop of the whole process is no part of them."""
        tcp = _bottom(store)
        port = tcp.port if isinstance(tcp, TCPStore) else None
        # torchrun keeps the store in its agent; elsewhere the process of rank 0 hosts it.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        self.host = "the launcher, which hosts it," if agent else "the process of rank 0, which hosts it,"
        self.host_rank = 0 if port is not None and not agent else None
        """The global rank of the process that hosts the store, if one of them does."""
        self.hosted = self.host_rank == dist.get_rank()
        """Whether this process hosts the store, so that the others lose it when this process ends."""
        before = _connections_to(port)
        self._line, self._lost = _Line({each.descriptor for each in before}), False
        own = before
        if own_connection:
            # A connection of our own, because a thread that waits for a key blocks every other call on the same one.
            self._store = self._connected(store)
            own = _connections_to(port) - before
            self._line = _Line({each.descriptor for each in own})
        keep_alive(own)
        self.address = next((address for each in own if (address := local_address(each))), "")
        """The address by which this host reaches the store; empty if that is unknown."""

    def __del__(self) -> None:
        self._clerk.end()

    def clone(self) -> Any:
        """The store itself, on one more connection. It does not keep a server alive that this process hosts."""
        return self._connected(self._store)

    def _connected(self, store: Any) -> Any:
        """``store`` on one more connection. torch tries for minutes to connect to a host that has ended; so the connections
        that are there are looked at meanwhile."""
        self._require_line()
        clerk = _Clerk()
        try:
            return clerk.do(store.clone, store.timeout.total_seconds(), lambda seconds: self._require_line())
        except (_Silence, dist.DistNetworkError, dist.DistStoreError) as error:
            self._lost = True
            raise StoreLostError(f"{self.host} takes no further connection: {error}") from error
        finally:
            clerk.end()

    def set(self, key: str, value: str) -> None:
        """Write a value."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str) -> str:
        """Read a value that is there."""
        value: bytes = self._ask(lambda: self._store.get(key))
        return value.decode(errors="replace")

    def values(self, keys: Sequence[str]) -> list[str]:
        """Read several values, empty where there is none: in two calls if all are there."""
        listed = list(keys)
        found = self._ask(lambda: self._store.multi_get(listed) if self._store.check(listed) else None)
        if found is None:
            return [self.get(key) if self.has(key) else "" for key in listed]
        return [value.decode(errors="replace") for value in found]

    def has(self, key: str) -> bool:
        """Whether there is a value."""
        return bool(self._ask(lambda: self._store.check([key])))

    def add(self, key: str, amount: int) -> int:
        """Add to a counter; returns its new value."""
        return int(self._ask(lambda: self._store.add(key, amount)))

    def _ask(self, call: Callable[[], T]) -> T:
        self._require_line()
        try:
            return self._clerk.do(call, self._within, self._waited_for)
        except _Silence:
            raise StoreSilentError(f"{self.host} has not answered for {self._within:g} s") from None
        except (dist.DistNetworkError, dist.DistStoreError) as error:
            self._lost = True
            raise StoreLostError(f"{self.host} no longer answers: {error}") from error

    def _waited_for(self, seconds: float) -> None:
        self.waited += seconds

    def _require_line(self) -> None:
        if self._lost or self._line.is_cut():
            self._lost = True
            raise StoreLostError(f"{self.host} has ended, or cannot be reached")


class _Silence(Exception):
    """A call takes too long."""


class _Clerk:
    """A thread that asks, so that the waiter need not wait for a host that is stopped, or cut off: a call to the
    store itself knows no limit. While it waits for such an answer nobody else begins to.

    An executor of one thread is not enough: the interpreter waits for its thread at the end.
    """

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._begun, self._stuck = False, threading.Event()
        self._lock = threading.RLock()
        """One that the handler of a signal may take in the midst of a call of its own thread."""

    def do(self, call: Callable[[], T], within: float, pause: Callable[[float], None]) -> T:
        """What ``call`` returns or raises; :class:`_Silence` if that takes too long, or another call already has. ``pause`` is
        called for each slice without an answer, with its seconds."""
        if not self._begin():
            return call()
        if self._stuck.is_set():
            raise _Silence
        answer: Future[T] = Future()
        self._calls.put((answer, call))
        # In slices: they pass as slowly as everything else where the whole machine stands still.
        for _ in range(max(1, round(within / _SLICE))):
            if wait([answer], _SLICE).done:
                break
            pause(_SLICE)
        else:
            with self._lock:
                if not answer.done():
                    answer.cancel()  # if it has not begun
                    self._stuck.set()
                    raise _Silence
        return answer.result()

    def _begin(self) -> bool:
        """Whether there is a thread: at the end of the process none runs, or can be started, any more."""
        if sys.is_finalizing():
            return False
        with self._lock:
            if not self._begun:
                try:
                    threading.Thread(target=self._work, name="gossamer-store", daemon=True).start()
                except RuntimeError:
                    return False
                self._begun = True
        return True

    def end(self) -> None:
        """Let the thread end. Nobody is going to ask any more."""
        self._calls.put(None)

    def _work(self) -> None:
        while (job := self._calls.get()) is not None:
            answer, call = job
            if answer.set_running_or_notify_cancel():
                try:
                    answer.set_result(call())
                except BaseException as error:
                    answer.set_exception(error)
            with self._lock:
                if self._calls.empty():
                    self._stuck.clear()
            del job, answer, call  # with what they hold, while there is nothing to do


_SLICE = 0.1


class _Line:
    """The connections of a store's clients, as far as they were found."""

    def __init__(self, found: set[int]) -> None:
        self._descriptors = [os.dup(descriptor) for descriptor in found]

    def is_cut(self) -> bool:
        """Whether the other side has gone, from all of them: some may be left of an earlier store at the same port."""
        poll = select.poll()  # its own: two threads may ask concurrently
        for descriptor in self._descriptors:
            poll.register(descriptor, CLOSED)
        return bool(self._descriptors) and len(poll.poll(0)) == len(self._descriptors)

    def __del__(self) -> None:
        for descriptor in self._descriptors:
            os.close(descriptor)


def _connections_to(port: int | None) -> frozenset[Connection]:
    """The connections of this process to ``port`` on any host."""
    return frozenset() if port is None else frozenset(each for each in connections() if each.port == port)


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()


def _bottom(store: Any) -> Any:
    """A store without the prefixes that were put on it."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store


_board_store: tuple[weakref.ref[Any], QuietStore] | None = None


def board_store(before_it_ends: Callable[[], object] | None = None) -> QuietStore:
    """That store, on a connection that all boards of this process share. ``before_it_ends``: called where its server is in this
    process.

    It ends with the process group, as it would without us: another group on the same port is to find an empty one. A server in
    this process then only waits, for a few seconds at most, until the others have read why replicas ended.
    """
    global _board_store
    store = default_store()
    if _board_store is None or _board_store[0]() is not store:
        quiet = QuietStore(store)
        _board_store = weakref.ref(store), quiet
        if quiet.hosted and before_it_ends is not None:
            weakref.finalize(store, _ends, before_it_ends, _bottom(store)).atexit = False
    return _board_store[1]


def _ends(before: Callable[[], object], server: Any) -> None:
    """``server`` lives until this is over."""
    before()
