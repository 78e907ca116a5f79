"""A runner among two ranks of which only one is there: every operation gives back what this rank would have sent."""

from collections.abc import Callable
from typing import Any

from gossamer.comm.device import Device
from gossamer.comm.echo import EchoPort
from gossamer.comm.loopback import InlineRunner
from gossamer.comm.runner import CONTROL, Meter, Ticket
from gossamer.comm.torch.streams import StreamLanes


class EchoRunner(InlineRunner):
    """Data lanes on streams of a device, as with NCCL; agreements immediately."""

    def __init__(self, device: Device, port: Any = None) -> None:
        super().__init__(EchoPort(0, 2), Meter(), 0, 2)
        self.device, self.lanes = device, 2
        self.data = StreamLanes(port or EchoPort(0, 2), device, 2)

    def submit(self, make_flow: Callable[[], Any], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[Any]:
        if lane == CONTROL:
            return super().submit(make_flow, label, lane)
        ticket: Ticket[Any] = Ticket(0, label)
        self.data.submit(ticket, make_flow, lane)
        if ticket.error is not None:
            raise ticket.error
        return ticket

    def wait(self, ticket: Ticket[Any], meanwhile: Any = None) -> Any:
        if ticket.event is not None:
            self.device.follow(ticket.event, ticket.result)
        return ticket.result
