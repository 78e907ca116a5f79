"""Departure: what a process tells the others when it ends, in whatever way."""

import atexit
import sys
import time
import weakref
from typing import Any, Protocol

import torch.distributed as dist

LINGER = 3.0
"""Seconds for which the process that hosts the store lets the others read why it ends: the store ends with it."""


class Leaver(Protocol):
    """A runner that has a board."""

    def depart(self, reason: str) -> None:
        """Post that this process ends; ``reason`` is empty if it ends well."""

    def is_needed(self) -> bool:
        """Whether this process hosts the store, and another rank has not read yet what is on the board."""


_leavers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_came = False


def register(leaver: Leaver) -> None:
    """Let ``leaver`` say goodbye when the process ends."""
    global _came
    _came = True
    _leavers.add(leaver)


def uncaught() -> str:
    """The error that ends this process, in words; empty if none does."""
    error = vars(sys).get("last_value")
    return "" if error is None else f"{type(error).__name__}: {error}".split("\n")[0][:300]


@atexit.register
def say_goodbye() -> None:
    """Tell ranks that still wait that this process ends, and why."""
    reason, leavers = uncaught(), list(_leavers)
    for leaver in leavers:
        leaver.depart(reason)
    if not _came and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        _say_that_it_never_came(reason)
    end = time.monotonic() + LINGER
    while time.monotonic() < end and any(leaver.is_needed() for leaver in leavers):
        time.sleep(0.02)


def _say_that_it_never_came(reason: str) -> None:
    from gossamer.comm.bulletin import note_exit
    from gossamer.comm.torch_store import QuietStore, default_store

    store = QuietStore(default_store())
    how = f"its process ended with {reason}" if reason else "its process ended without calling replicate()"
    if note_exit(store, dist.get_rank(), how) and reason and store.hosted:
        time.sleep(LINGER)
