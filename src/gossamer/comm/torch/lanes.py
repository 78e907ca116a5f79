"""Lane: one ordered queue of flows, run beside the training loop.

Note, who owns what, until when (cited by the modules that depend on it):

1. The *main thread* (the one that runs backward and the optimizer) submits flows, in the plan's order, the same on
   every rank. A flow is created inside its lane, so an algorithm's code never runs on the main thread of a host lane.
   (The backward pass of a model on a GPU is run by a thread of autograd's, for which the one of the script waits. Ctrl-C
   does not end that wait: an exchange that is waited for there, over Gloo, ends by itself or with its timeout.)
2. From submission until its ticket is done, the bucket's flat tensor belongs to the flow: the main thread neither
   reads nor writes it. Parameters always belong to the main thread; flows never touch them. A result may be made of the
   bucket's messages (``Difference``): those stay as they are until it is added, before the bucket is filled again.
3. Each host lane is one thread with process groups of its own, so operations of two lanes can pass each other on the
   wire while those of one lane meet their counterparts in order.
4. Flows that are *prompt* (``Algorithm.prompt``) are an exception to 1: the main thread starts their operations when it
   submits them, and goes on with them when it waits for their result. That saves two changes of threads per bucket,
   which four ranks on two processors feel. Waits that cannot be cut short are left to the lane. While such flows are
   under way no other ones are on the same lanes: their operations would meet in another order on every rank.
5. On a device, one thread (the one that submits) issues everything, in plan order, on a side stream: several
   communicators used from several threads can deadlock. Nothing waits on the host; a ticket carries an event.
   Where a host lane works on tensors of a device (the control lane; all lanes on Gloo), its thread issues on the stream
   that was current where the flow was submitted: after all that was issued there, and with memory of that stream only.
6. The first error in any lane ends all lanes: what is queued fails immediately with the same error. The main thread,
   which waits in short slices, raises it.
"""

import queue
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from gossamer.comm.device import Device
from gossamer.comm.ops import Begun, Flow, shown
from gossamer.comm.runner import Meter, Ticket

T = TypeVar("T")

_Job = Callable[[], None]


class PromptTicket(Ticket[T]):
    """The promise of a prompt flow: the main thread starts it, and carries it on while it waits for it."""

    __slots__ = ("_begun", "_left", "_meter", "_port")

    def __init__(self, sequence: int, label: str) -> None:
        super().__init__(sequence, label)
        self._begun: Any = None
        self._port: Any = None
        self._left = False

    def begin(self, make_flow: Callable[[], Flow[T]], port: Any, meter: Meter) -> None:
        """Start the flow's operations."""
        self._port, self._meter = port, meter
        self.begun, self.doing = True, "the computation"
        port.ticket = self
        self._do(partial(self._start, make_flow))

    def _start(self, make_flow: Callable[[], Flow[T]]) -> None:
        self._begun = Begun(make_flow(), self._port)
        self._begun.may_start = False

    @property
    def interruptible(self) -> bool:
        """Whether a wait for it can be cut short."""
        return self.done.is_set() or bool(self._port.interruptible(self._begun.handle))

    @property
    def left(self) -> bool:
        """Whether a lane waits for it, and not the main thread."""
        return self._left

    def leave(self) -> None:
        """From now on a lane waits for it, not the main thread."""
        self._left = True

    def carry_on(self) -> None:
        """Wait, however long that takes. For lanes."""
        while not self.done.is_set():
            self._go_on()

    @torch.no_grad()
    def wait(self, seconds: float) -> bool:
        end = time.monotonic() + seconds
        while not self._left and not self.done.is_set():
            if self._port.interruptible(self._begun.handle) and not self._arrives(max(0.0, end - time.monotonic())):
                return False
            self._go_on()
        return self.done.wait(max(0.0, end - time.monotonic()))

    def _arrives(self, seconds: float) -> bool:
        begin = time.perf_counter()
        arrived: bool = self._port.arrives(self._begun.handle, seconds)
        self._meter.busy_seconds += time.perf_counter() - begin
        return arrived

    @property
    def failed(self) -> bool:
        if not self._left and not self.done.is_set() and self._port.broke(self._begun.handle):
            self._go_on()  # which raises
        return super().failed

    def _go_on(self) -> None:
        self._do(self._receive)

    def _receive(self) -> None:
        with shown("wire", self.label):
            reply = self._port.wait(self._begun.handle)
        self._begun.go_on(reply)

    def _do(self, work: Callable[[], None]) -> None:
        """Carry the flow on; at its end, or at an error, it is done."""
        begin = time.perf_counter()
        try:
            with shown("flow", self.label):
                work()
            if self._begun.ended:
                self.result = self._begun.result
        except Exception as error:  # Ctrl-C is the main thread's own
            self.error = error
        self._meter.busy_seconds += time.perf_counter() - begin
        if self.error is not None or self._begun.ended:
            # The port and its ticket know each other: without this, only the garbage collector would end a closed replica's
            # groups, and the result would live until the port's next flow.
            _let_go(self._port, self)
            self._begun = self._port = None
            self.conclude()


def _let_go(port: Any, ticket: Ticket[Any]) -> None:
    """A port forgets a ticket that is done, unless it has the next one already."""
    if port.ticket is ticket:
        port.ticket = None


class ThreadLanes:
    """Host lanes: one daemon thread per port. Daemons, because a thread inside a wait on the network cannot be stopped."""

    def __init__(self, ports: list[Any], meters: list[Meter], device: Device | None = None) -> None:
        """``device``: where tensors may lie that flows work on, if not on the host. Such lanes take no prompt flows."""
        self.error: BaseException | None = None
        self.ports, self._meters, self._device = ports, meters, device
        self._queues: list[queue.SimpleQueue[_Job | None]] = [queue.SimpleQueue() for _ in ports]
        self._threads = [
            threading.Thread(target=self._loop, args=(jobs, device), name=f"gossamer-lane-{index}", daemon=True)
            for index, jobs in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()
        # A runner that is dropped without being closed leaves no threads behind. (A process that ends ends them anyway.)
        self._end = weakref.finalize(self, _end, self._queues)
        self._end.atexit = False

    def submit(self, ticket: Ticket[T], make_flow: Callable[[], Flow[T]], lane: int) -> None:
        """Queue a flow on ``lane``."""
        port, meter = self.ports[lane], self._meters[lane]
        stream = None if self._device is None else self._device.joined()
        self._queues[lane].put(lambda: self._carry_out(ticket, make_flow, port, meter, stream))

    @torch.no_grad()
    def begin(self, ticket: PromptTicket[T], make_flow: Callable[[], Flow[T]], lane: int) -> None:
        """Start a prompt flow on the port of ``lane``, here and now."""
        if self.error is not None:
            ticket.error = self.error
            ticket.done.set()
            return
        ticket.begin(make_flow, self.ports[lane], self._meters[lane])
        if ticket.error is not None:
            self.error = ticket.error
        elif not ticket.interruptible:
            self.take_over(ticket, lane)

    def take_over(self, ticket: PromptTicket[Any], lane: int = 0) -> None:
        """Wait for a prompt flow on a lane, so that the main thread need not; on one, however often it is asked for."""
        if not ticket.left:
            ticket.leave()
            self._queues[lane].put(ticket.carry_on)

    def close(self) -> None:
        """End the threads once their queues are empty."""
        self._end()

    def _carry_out(self, ticket: Ticket[T], make_flow: Callable[[], Flow[T]], port: Any, meter: Meter, stream: Any) -> None:
        if self.error is not None:
            ticket.error = self.error
            ticket.done.set()
            return
        port.ticket = ticket
        begin = time.perf_counter()
        ticket.carry_out(make_flow, port, stream)
        _let_go(port, ticket)
        meter.busy_seconds += time.perf_counter() - begin
        if ticket.error is not None:
            self.error = ticket.error

    @staticmethod
    @torch.no_grad()
    def _loop(jobs: "queue.SimpleQueue[_Job | None]", device: Device | None) -> None:
        if device is not None:
            device.enter_thread()
        while (job := jobs.get()) is not None:
            job()
            del job  # the closure holds tensors; do not keep them while waiting for the next


def _end(queues: "list[queue.SimpleQueue[_Job | None]]") -> None:
    for jobs in queues:
        jobs.put(None)
