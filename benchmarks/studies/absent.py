"""Absent: a runner among ranks of which only this one is there. It does what training with others does, and nothing travels."""

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.comm.device import Device
from gossamer.comm.echo import EchoPort
from gossamer.comm.loopback import InlineRunner
from gossamer.comm.ops import Flow
from gossamer.comm.runner import CONTROL, Meter, Ticket
from gossamer.comm.torch.device_ports import DevicePort
from gossamer.comm.torch.gloo import Circle, GlooPort
from gossamer.comm.torch.lanes import PromptTicket, ThreadLanes
from gossamer.comm.torch.streams import StreamLanes

T = TypeVar("T")


class _Silence:
    """A fake process group from which zeros are received, and not whatever was in that memory."""

    def __init__(self, group: Any) -> None:
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def recv(self, tensors: list[Tensor], source: int, tag: int) -> Any:
        """Zeros, without waiting."""
        for tensor in tensors:
            tensor.zero_()
        return self._group.recv(tensors, source, tag)


class AbsentRunner(InlineRunner):
    """Lanes as :class:`~gossamer.comm.torch.runner.TorchRunner` has them, over torch's fake process group; no waiting.

    On the host two threads, or the main one, where the algorithm is prompt; on a device its streams, as with NCCL.
    """

    def __init__(self, device: torch.device) -> None:
        """Over the default process group, which is to be a fake one."""
        world, meters = dist.get_world_size(), [Meter(), Meter()]
        rank = dist.get_rank()
        super().__init__(EchoPort(rank, world), Meter(), rank, world)
        group = _Silence(dist.group.WORLD)
        everyone = Circle(group, group, tuple(range(world)))
        self.lanes, self._meters = len(meters), meters
        self._device = None if device.type == "cpu" else Device(device)
        self._data: ThreadLanes | StreamLanes
        if self._device is None:
            self._data = ThreadLanes([GlooPort(everyone, lambda _: everyone, meter) for meter in meters], meters)
        else:
            port = DevicePort(everyone, lambda _: everyone, meters[0])
            self._data = StreamLanes(port, self._device, self.lanes)

    def agree_on_opening(self, what: str = "gossamer.replicate()", devices: Collection[torch.device] = ()) -> None:
        """There is nobody to meet."""

    def submit(self, make_flow: Callable[[], Flow[T]], label: str, lane: int = 0, *, prompt: bool = False) -> Ticket[T]:
        if lane == CONTROL:
            return super().submit(make_flow, label, lane)
        if prompt and isinstance(self._data, ThreadLanes):
            started: PromptTicket[T] = PromptTicket(self._submitted, label)
            self._data.begin(started, make_flow, lane)
            return started
        ticket: Ticket[T] = Ticket(self._submitted, label)
        self._data.submit(ticket, make_flow, lane)
        return ticket

    def note_writer(self) -> None:
        if self._device is not None:
            self._device.note_writer()

    def wait(self, ticket: Ticket[T], meanwhile: Callable[[], bool] | None = None) -> T:
        while ticket.event is None and not ticket.wait(1.0):
            pass
        if ticket.error is not None:
            raise ticket.error
        if self._device is not None and ticket.event is not None:
            self._device.forget_writers()
            self._device.follow(ticket.event, ticket.result)
        return ticket.result  # type: ignore[return-value]

    def meters(self) -> list[Meter]:
        return [self._meter, *self._meters]

    def close(self, graceful: bool = True) -> None:
        self._data.close()
