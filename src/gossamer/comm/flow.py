"""Flow driver: runs one generator against one port, the same way for every runner, and shows flows in ``torch.profiler``."""

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from gossamer.comm.ops import Command, Decide, Flow, Group, Op, Start, Wait

T = TypeVar("T")


class Port(Protocol):
    """One ordered channel to the other ranks: the k-th operation started on it meets the k-th of every other rank."""

    def start(self, op: Op, group: Group | None = None) -> Any:
        """Hand an operation to the transport, among all members or those of ``group``; returns a handle."""

    def wait(self, handle: Any) -> Tensor:
        """Block (or, on a device, order the stream) until the operation is done; returns its result."""

    def decide(self, decision: Decide) -> Any:
        """Take a decision that depends on data."""


class Begun(Generic[T]):
    """A flow on its way: ``handle`` is what it waits for, until it has ``ended`` with its ``result``."""

    def __init__(self, flow: Flow[T], port: Port) -> None:
        self.handle: Any = None
        self.may_start = True
        """Whether more operations may be started."""
        self.ended = False
        self.result: T | None = None
        self._flow, self._port = flow, port
        self.go_on(None)

    def go_on(self, reply: Any) -> None:
        """Carry out, on the port, every command until it waits again, or ends; ``reply`` is what it waited for."""
        while True:
            try:
                command = self._flow.send(reply)
            except StopIteration as stop:
                self.result, self.ended = stop.value, True
                return
            if isinstance(command, Wait):
                self.handle = command.handle
                return
            if isinstance(command, Start) and not self.may_start:
                raise TypeError(f"a prompt algorithm starts everything before it waits; {command.op} came later")
            reply = answer(command, self._port)


def answer(command: Command, port: Port) -> Any:
    """Carry out a command that is no wait; what the flow is sent back."""
    if isinstance(command, Start):
        return port.start(command.op, command.group)
    if isinstance(command, Decide):
        return port.decide(command)
    raise TypeError(f"an algorithm yielded {command!r}; only start(op), wait(handle) and decide(…) are known")


def drive(flow: Flow[T], port: Port, label: str = "") -> T:
    """Carry out every command that ``flow`` yields on ``port`` and return what the flow returns."""
    begun = Begun(flow, port)
    while not begun.ended:
        with shown("wire", label):
            reply = port.wait(begun.handle)
        begun.go_on(reply)
    return begun.result  # type: ignore[return-value]


_STEP = re.compile(r"( (at|after|of( the optimizer's)?))? step \d+$")
_NOTHING = nullcontext()


def shown(what: str, label: str) -> AbstractContextManager[Any]:
    """Show what runs inside as ``gossamer: <what> of <label>``, without the number of a step, so that steps can be summed up.

    Where there is no profiler, which is asked first, it costs less than a microsecond. Lanes are threads of their own:
    a profiler sees their flows with ``experimental_config=torch._C._profiler._ExperimentalConfig(profile_all_threads=True)``.
    """
    # The flag of the process: the one of the thread is False everywhere where a profiler follows all threads.
    if not torch.autograd.profiler._is_profiler_enabled:
        return _NOTHING
    name = _STEP.sub("", label).replace("…", "...")  # a Chrome trace says "unknown" for what is not ASCII
    return torch.profiler.record_function(f"gossamer: {what} of {name}")
