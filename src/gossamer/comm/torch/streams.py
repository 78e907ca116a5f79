"""Streams: the lanes of a device, on which flows are issued by the thread that submits them."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from gossamer.comm.device import Device
from gossamer.comm.ops import Flow
from gossamer.comm.runner import Ticket

T = TypeVar("T")


class StreamLanes:
    """Device lanes: flows are issued when they are submitted, by that thread, on one side stream per lane."""

    def __init__(self, port: Any, device: Device, lanes: int) -> None:
        self.error: BaseException | None = None
        self._port, self._device = port, device
        self._streams: list[Any] = [device.new_stream() for _ in range(lanes)]

    @torch.no_grad()
    def submit(self, ticket: Ticket[T], make_flow: Callable[[], Flow[T]], lane: int) -> None:
        """Issue a flow on the stream of ``lane``, ordered after everything issued so far on the streams that wrote for it."""
        if self.error is not None:
            ticket.error = self.error
            ticket.done.set()
            return
        stream = self._streams[lane % len(self._streams)]
        for writer in self._device.writers():
            stream.wait_stream(writer)
        self._port.ticket = ticket
        ticket.carry_out(make_flow, self._port, stream)
        if ticket.error is not None:
            self.error = ticket.error

    def close(self) -> None:
        """Nothing to end: there are no threads."""
