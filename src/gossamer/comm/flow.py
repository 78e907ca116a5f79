"""Flow driver: runs one generator against one port, the same way for every runner."""

from typing import Any, Protocol, TypeVar

from torch import Tensor

from gossamer.comm.ops import Decide, Flow, Group, Op, Start, Wait

T = TypeVar("T")


class Port(Protocol):
    """One ordered channel to the other ranks: the k-th operation started on it meets the k-th of every other rank."""

    def start(self, op: Op, group: Group | None = None) -> Any:
        """Hand an operation to the transport, among all members or those of ``group``; returns a handle."""

    def wait(self, handle: Any) -> Tensor:
        """Block (or, on a device, order the stream) until the operation is done; returns its result."""

    def decide(self, decision: Decide) -> Any:
        """Take a decision that depends on data."""


def drive(flow: Flow[T], port: Port) -> T:
    """Carry out every command that ``flow`` yields on ``port`` and return what the flow returns."""
    reply: Any = None
    while True:
        try:
            command = flow.send(reply)
        except StopIteration as stop:
            result: T = stop.value
            return result
        if isinstance(command, Wait):
            reply = port.wait(command.handle)
        elif isinstance(command, Start):
            reply = port.start(command.op, command.group)
        elif isinstance(command, Decide):
            reply = port.decide(command)
        else:
            raise TypeError(f"an algorithm yielded {command!r}; only start(op), wait(handle) and decide(…) are known")
