"""Process exit: what a process tells the others when it ends, in whatever way."""

import atexit
import ctypes
import os
import signal
import sys
import threading
import time
import weakref
from importlib import import_module
from types import FrameType
from typing import Any, Protocol

import torch.distributed as dist

from gossamer.comm.torch.attempts import note_exit
from gossamer.comm.torch.store import QuietStore, StoreLostError, board_store, default_store

LINGER = 3.0
"""Seconds for which the process that hosts the store lets the others read why it ends: the store ends with it."""

_LINGER_AFTER_INTERRUPT = 1.0
_WAIT_FOR_LANES = 0.5


class Leaver(Protocol):
    """A runner that has a board."""

    def depart(self, reason: str) -> None:
        """Post that this process ends; ``reason`` is empty if it ends well."""

    def is_stuck(self) -> bool:
        """Whether a thread of this process waits for the network."""

    def is_needed(self) -> bool:
        """Whether this process hosts the store, and another rank has not read yet what is on the board."""


_leavers: "weakref.WeakSet[Any]" = weakref.WeakSet()
_came = False


def register(leaver: Leaver) -> None:
    """Let ``leaver`` say goodbye when the process ends."""
    global _came
    _came = True
    _leavers.add(leaver)
    notice_termination()


def notice_termination() -> None:
    """Have SIGTERM, by which schedulers take a machine back, tell the other ranks before it ends this process.

    Only where nobody else handles it. A process that is forked from this one (a worker of a DataLoader) ends as ever.
    """
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _terminated)


def _terminated(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)
    for leaver in list(_leavers):
        leaver.depart("SIGTERM (preempted, or ended by its launcher)")
    linger()
    os.kill(os.getpid(), number)


def _leave_termination_alone() -> None:
    if signal.getsignal(signal.SIGTERM) is _terminated:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


os.register_at_fork(after_in_child=_leave_termination_alone)


def uncaught() -> str:
    """The error that ends this process, in words; empty if none does."""
    error = vars(sys).get("last_value")
    return "" if error is None else f"{type(error).__name__}: {error}".split("\n")[0][:300].removesuffix(": ")


def listen() -> None:
    """Notice the end of this process, from now on (not that of a process forked from it)."""
    atexit.register(say_goodbye, os.getpid())


def let_groups_end() -> None:
    """Have the threads of a process group end with ``destroy_process_group()``. To be called before there is one.

    Functions of the module below have the process group of the moment as a default argument. Left to an optimizer, which
    imports them by way of ``torch._dynamo``, mostly after ``init_process_group()``, they hold the group for ever; and a thread
    of Gloo that drops a tensor while the interpreter is torn down aborts the process.
    """
    if dist.is_available() and not dist.is_initialized():
        import_module("torch.distributed.nn.functional")


def say_goodbye(process: int) -> None:
    """Tell ranks that still wait that this process ends, and why."""
    if os.getpid() != process:
        return
    reason, leavers = uncaught(), list(_leavers)
    for leaver in leavers:
        leaver.depart(reason)
    alone = not dist.is_available() or not dist.is_initialized() or dist.get_world_size() == 1
    hosting = not alone and _say_where_replicas_open(reason) and not any(leaver.is_needed() for leaver in leavers)
    interrupted = reason.startswith(KeyboardInterrupt.__name__)
    linger(_LINGER_AFTER_INTERRUPT if interrupted else None, hosting)
    end = time.monotonic() + _WAIT_FOR_LANES
    while any(leaver.is_stuck() for leaver in leavers):
        if time.monotonic() > end:
            _let_stuck_threads_sleep()
            break
        time.sleep(0.005)


def linger(seconds: float | None = None, hosting: bool = False) -> None:
    """Wait until nobody needs the store in this process any more, for ``LINGER`` or so many seconds at most. ``hosting``:
    somebody does need it."""
    leavers, end = list(_leavers), time.monotonic() + (LINGER if seconds is None else seconds)
    while time.monotonic() < end and (hosting or any(leaver.is_needed() for leaver in leavers)):
        time.sleep(0.02)


def _let_stuck_threads_sleep() -> None:
    """Keep a thread that waits inside C++ from aborting the process when its wait ends.

    It cannot be ended from outside, and its wait ends when the other processes do: about now. Until 3.14 Python ends a
    thread that comes back while the interpreter is torn down by unwinding it, which C++ answers with
    ``std::terminate``; so that becomes an endless sleep, and the process ends with the exit status that it should have.
    """
    if sys.version_info >= (3, 14):
        return
    try:
        pause = ctypes.cast(ctypes.CDLL(None).pause, ctypes.c_void_p)
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(pause)
    except (OSError, AttributeError):  # another C++ library, another system
        return


def _say_where_replicas_open(reason: str) -> bool:
    """Tell ranks that wait for this one to open a replica with them, the first or another. Returns whether they may still have
    to read it from a store in this process, which has failed."""
    how = f"its process ended with {reason}" if reason else "its process ended"
    how += "" if reason or _came else " without calling replicate()"
    if _file_is_gone(default_store()):
        return False
    try:
        # Not on the default store's own connection once replicas were opened: a thread that opens groups may wait there.
        store = board_store() if _came else QuietStore(default_store(), own_connection=False)
        return note_exit(store, dist.get_rank(), how) and bool(reason) and store.hosted
    except StoreLostError:
        return False


def _file_is_gone(store: Any) -> bool:
    """Whether a store is a file that was deleted: to write there would wait for its folder to come back."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    path = getattr(store, "path", None)
    return isinstance(path, str) and not os.path.exists(path)
