"""A fake device: CPU tensors on streams that only keep count, and a judge of every access that no event orders.

Each stream has a vector clock. An event is a copy of it; waiting for one takes the maximum. Under :class:`Judge` every
operation of torch is an access, by the stream that is current in its thread, to the memory of its tensors: what another
stream wrote must be ordered before it, and so must what another one read, before it is written.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gossamer import memory
from gossamer.comm.device import Device

Clock = dict[str, int]


class FakeEvent:
    def __init__(self, clock: Clock, done: bool = True) -> None:
        self.clock, self.done = clock, done

    def query(self) -> bool:
        return self.done


class FakeStream:
    """One queue of work; ``with stream:`` makes it the current one of a thread, as with ``torch.Stream``."""

    def __init__(self, name: str, device: "FakeDevice") -> None:
        self.name, self.clock, self._device = name, {name: 0}, device

    def wait_event(self, event: FakeEvent) -> None:
        with self._device.lock:
            self._join(event)

    def _join(self, event: FakeEvent) -> None:
        self.clock = {n: max(self.clock.get(n, 0), event.clock.get(n, 0)) for n in {*self.clock, *event.clock}}

    def wait_stream(self, other: "FakeStream") -> None:
        self.wait_event(other.record_event())

    def record_event(self) -> FakeEvent:
        with self._device.lock:
            return FakeEvent(dict(self.clock), self._device.prompt)

    def tick(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]

    def __enter__(self) -> "FakeStream":
        self._device.stack().append(self)
        judge = self._device.judge
        if judge is not None:
            judge.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        if self._device.judge is not None:
            self._device.judge.__exit__(*error)
        self._device.stack().pop()


class FakeDevice(Device):
    """Counts every tensor of the host as its own, without the ones that it has put into pinned memory."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__(device or torch.device("cpu"))
        self.prompt = True
        """Whether work is done as soon as it is issued."""
        self.judge: Judge | None = None
        self.pinned: dict[int, weakref.ref[Tensor]] = {}
        self.kept: list[tuple[Tensor, FakeStream]] = []
        self.lock = threading.RLock()
        self._streams, self._local = 0, threading.local()
        self.default = self.new_stream()

    def stack(self) -> list[FakeStream]:
        if not hasattr(self._local, "stack"):
            self._local.stack = [self.default]
        return self._local.stack

    def current(self) -> FakeStream:
        return self.stack()[-1]

    def new_stream(self) -> FakeStream:
        self._streams += 1
        return FakeStream(f"stream {self._streams}", self)

    def enter_thread(self) -> None:
        return None

    def holds(self, tensor: Tensor) -> bool:
        return tensor.device.type == self.device.type and not self.is_pinned(tensor)

    def is_pinned(self, tensor: Tensor) -> bool:
        own = None if tensor.is_meta else self.pinned.get(tensor.untyped_storage().data_ptr())
        return own is not None and own() is not None

    def to_host(self, tensor: Tensor) -> Tensor:
        return self.pinned_like(tensor).copy_(tensor)

    def pinned_like(self, tensor: Tensor) -> Tensor:
        own = torch.empty(tensor.shape, dtype=tensor.dtype)
        if own.numel():
            self.pinned[own.untyped_storage().data_ptr()] = weakref.ref(own)
        return own

    def keep_for(self, tensor: Tensor, stream: Any) -> None:
        self.kept = [*self.kept[-7:], (tensor, stream)]

    @contextmanager
    def judged(self) -> Iterator["Judge"]:
        """Judge what this thread does, and all that is done inside of a stream."""
        self.judge = Judge(self)
        # A device hands out new memory for a moment, and not a thread's own: it knows which stream has done with it.
        before, memory._MOMENTARY = memory._MOMENTARY, -1
        with self.judge:
            yield self.judge
        self.judge, memory._MOMENTARY = None, before


class Judge(TorchDispatchMode):
    """``races``: accesses that nothing orders, in words."""

    def __init__(self, device: FakeDevice) -> None:
        super().__init__()
        self.races: list[str] = []
        self._device = device
        self._writes: dict[int, tuple[str, int]] = {}
        self._reads: dict[int, Clock] = {}
        self._alive: list[Tensor] = []  # so that no memory has two lives

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream, before = self._device.current(), [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        versions = [tensor._version for tensor in before]
        result = function(*args, **(kwargs or {}))
        written = [t for t, version in zip(before, versions, strict=True) if t._version != version]
        written += [t for t in tree_leaves(result) if isinstance(t, Tensor) and not function.is_view]
        with self._device.lock:
            now = stream.tick()
            for tensor in before if not function.is_view else ():
                self._read(tensor, stream, now, str(function))
            for tensor in written if not function.is_view else ():
                self._write(tensor, stream, now, str(function))
            self._alive += [t.detach() for t in written]
        return result

    def _read(self, tensor: Tensor, stream: FakeStream, now: int, what: str) -> None:
        early = set()
        for word in _words(tensor):
            writer, when = self._writes.get(word, (stream.name, 0))
            early |= {writer} if stream.clock.get(writer, 0) < when else set()
            self._reads.setdefault(word, {})[stream.name] = now
        self.races += [f"{what} on {stream.name} reads what {writer} may not have written yet" for writer in early]

    def _write(self, tensor: Tensor, stream: FakeStream, now: int, what: str) -> None:
        early = set()
        for word in _words(tensor):
            early |= {reader for reader, when in self._reads.get(word, {}).items() if stream.clock.get(reader, 0) < when}
            self._writes[word] = stream.name, now
        self.races += [f"{what} on {stream.name} writes what {reader} may still read" for reader in early]


def _words(tensor: Tensor) -> range:
    """The words of four bytes between the first and the last byte of a tensor."""
    if tensor.numel() == 0:
        return range(0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return range(begin // 4, (begin + (last + 1) * tensor.element_size() + 3) // 4)
