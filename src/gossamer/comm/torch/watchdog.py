"""Watchdog: notices on a device what the main thread, which never waits there, cannot: that a flow does not come to its end."""

import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from gossamer.comm.device import Device
from gossamer.comm.runner import Ticket
from gossamer.comm.torch.waiting import WaitPolicy
from gossamer.errors import GossamerError

_logger = logging.getLogger("gossamer")


class Issued(Ticket[None]):
    """A flow that is issued to a device: ends when the device has done it. Holds none of its tensors."""

    def __init__(self, ticket: Ticket[Any]) -> None:
        super().__init__(ticket.sequence, ticket.label)
        self.doing = "the computation, or the first message to another rank"

    def follow(self, event: Any, asked: tuple[str, str]) -> None:
        """It is issued. ``event``: its end, None if nothing is to be waited for. ``asked``: its operations, and the ranks
        that they wait for, in words."""
        self.doing, self.peers = asked
        if event is None:
            self.done.set()
        self.event = event

    def wait(self, seconds: float) -> bool:
        """Whether the device has done it, within so many seconds (looked at only before and after)."""
        if not self._ended():
            time.sleep(seconds)
        return self._ended()

    def _ended(self) -> bool:
        if not self.done.is_set() and self.event is not None and self.event.query():
            self.done.set()
        return self.done.is_set()


class Watchdog:
    """A thread that waits for what a device was given, oldest first, under the same wait policy as the main thread elsewhere.

    After ten seconds it warns, naming flow and late ranks; it is told of other ranks' failures; after the timeout it gives up.
    Then ``fail`` ends what the device waits for, so that the main thread, which may stand in a synchronisation (``.item()``),
    goes on to its next exchange and raises the error there.

    The thread holds neither the watchdog nor the owner of the method ``fail``: once both are released, no thread is left.
    """

    def __init__(self, policy: WaitPolicy, device: Device, fail: Callable[[GossamerError], Any]) -> None:
        self._queue: queue.SimpleQueue[Issued | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        body = partial(_loop, self._queue, policy, device, weakref.WeakMethod(fail), self._ended)
        threading.Thread(target=body, name="gossamer-watchdog", daemon=True).start()
        self._end = weakref.finalize(self, self._queue.put, None)
        self._end.atexit = False

    def add(self, issued: Issued) -> None:
        """Wait for this one too."""
        self._queue.put(issued)

    def close(self) -> None:
        """End, once everything that was added has come to its end."""
        self._end()

    def ends(self, seconds: float) -> bool:
        """Whether it has ended, within so many seconds: nothing is under way, or ``fail`` was called."""
        return self._ended.wait(seconds)


def _loop(
    jobs: "queue.SimpleQueue[Issued | None]",
    policy: WaitPolicy,
    device: Device,
    weak: "weakref.WeakMethod[Callable[[GossamerError], Any]]",
    ended: threading.Event,
) -> None:
    try:
        device.enter_thread()
        while (issued := jobs.get()) is not None:
            policy.wait(issued, _nothing)
    except GossamerError as error:
        fail = weak()
        if fail is not None:
            fail(error)
    except Exception as error:  # what the device itself did wrong is raised where the main thread meets it
        _logger.debug("stopped watching the device: %s", error)
    finally:
        ended.set()


def _nothing() -> None:
    return None
