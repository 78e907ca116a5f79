"""Device: the streams of one accelerator, as far as lanes and ports need to know them."""

import ctypes
from typing import Any

import torch
from torch import Tensor


class Device:
    """One accelerator. What is written on one of its streams may be read on another only after an event, or a wait."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._wrote: list[Any] = []

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies here."""
        return tensor.device == self.device

    def current(self) -> Any:
        """The stream on which the calling thread issues work."""
        return torch.accelerator.current_stream(self.device)

    def new_stream(self) -> Any:
        """A side stream; a context manager that makes it the current one."""
        return torch.Stream(self.device)

    def note_writer(self) -> None:
        """The current stream has written into a bucket that is going to be submitted, perhaps from another stream."""
        current = self.current()
        if current not in self._wrote:
            self._wrote.append(current)

    def forget_writers(self) -> None:
        """Everything written so far has been exchanged."""
        self._wrote.clear()

    def writers(self) -> list[Any]:
        """The streams on which the next flow depends: the current one first."""
        current = self.current()
        return [current, *(stream for stream in self._wrote if stream != current)]

    def joined(self) -> Any:
        """The current stream, made to wait for the others that wrote."""
        current, *others = self.writers()
        for other in others:
            current.wait_stream(other)
        return current

    def follow(self, event: Any, result: Any) -> None:
        """Make the current stream wait for what a flow issued; ``result`` is then used, and in the end freed, on it."""
        current = self.current()
        current.wait_event(event)
        if isinstance(result, Tensor) and self.holds(result):
            self.keep_for(result, current)

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        """Once ``tensor`` is freed, do not hand out its memory before ``stream`` has done what it was given until then."""
        tensor.record_stream(stream)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy in pinned memory of the host. Waits until its bytes are there: for what is on the current stream so far."""
        copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        copy.copy_(tensor, non_blocking=True)
        event = torch.Event(self.device, blocking=True)
        event.record(self.current())
        event.synchronize()
        return copy

    def pinned_like(self, tensor: Tensor) -> Tensor:
        """Uninitialised pinned memory of the host for a tensor that is to come here."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)

    def from_host(self, host: Tensor, out: Tensor | None = None) -> Tensor:
        """Copy here, into ``out`` if that is given, on the current stream. From pinned memory the host does not wait."""
        out = torch.empty(host.shape, dtype=host.dtype, device=self.device) if out is None else out
        return out.copy_(host, non_blocking=True)

    def enter_thread(self) -> None:
        """Prepare a thread of our own: it must not wake another GPU, nor spoil what another thread captures.

        While a thread captures a CUDA graph, queries of events by others make it invalid, unless their threads say that they
        are not meant to be part of it. (torch's own watcher of NCCL does the same.)
        """
        torch.accelerator.set_device_index(self.device)
        if self.device.type == "cuda":
            try:
                relaxed = ctypes.c_int(2)
                ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(relaxed))
            except (OSError, AttributeError):  # another system
                return
