"""Store: the key-value store that the process group was made with, asked in a way that prints nothing."""

import os
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from gossamer.comm.bulletin import StoreLostError

T = TypeVar("T")

_PROBE_EVERY = 0.2


class QuietStore:
    """The four operations of ``torch.distributed.Store`` that a bulletin needs.

    A ``TCPStore`` whose host has ended writes pages of stack traces on each call. So its port is tried first, and a
    store that was lost once is not asked again.
    """

    def __init__(self, store: Any) -> None:
        self._origin = store  # the server, on the process that hosts it, lives as long as this
        # A connection of its own, because a thread that waits for a key blocks every other call on the same one.
        self._store = store.clone()
        self._lost, self._seen = False, 0.0
        while isinstance(store, PrefixStore):
            store = store.underlying_store
        self._address = (store.host, store.port) if isinstance(store, TCPStore) else None
        if self._address is not None and not self._answers():
            self._address = None  # behind a proxy, say: the store works, but its port cannot be tried
        # torchrun keeps the store in its agent; elsewhere the process of rank 0 hosts it.
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        self.hosted = self._address is not None and not agent and dist.get_rank() == 0
        """Whether this process hosts the store, so that the others lose it when this process ends."""

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
        if self._lost or not self._fresh():
            self._lost = True
            raise StoreLostError("its host has ended, or cannot be reached")
        return call()

    def _fresh(self) -> bool:
        """Whether the store answered a moment ago, or does now."""
        if self._address is None or time.monotonic() - self._seen < _PROBE_EVERY:
            return True
        return self._answers()

    def _answers(self) -> bool:
        try:
            socket.create_connection(self._address, timeout=2.0).close()  # type: ignore[arg-type]
        except OSError:
            return False
        self._seen = time.monotonic()
        return True


def default_store() -> Any:
    """The store of the default process group."""
    return dist.distributed_c10d._get_default_store()
