"""Processor: what codecs, copies and the transport's own work take, on what the workers of a machine share.

Kernels are priced by the names under which ``benchmarks/studies/kernels.py`` measures them: in bytes of gradient per second,
or where no speed is given as a share of a memory copy. All other operations on tensors count as copies of what they write.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from gossamer.simulate.clock import Clock, Event
from gossamer.simulate.cluster import Processor
from gossamer.simulate.kernels import SHARES_OF_COPY
from gossamer.simulate.line import Shared

_TOP_K = torch.ops.aten.topk.default
_MAKES_NOTHING = ("empty", "zeros", "view", "detach", "as_strided", "alias", "new_empty", "scalar_tensor", "full")


class Processing:
    """A worker's part of what a machine's workers share, and what was asked of it and not done yet, by the loop or a flow.

    What the workers of a machine ask for is alike, so that each has the same part of the cores.
    """

    def __init__(self, clock: Clock, processor: Processor, workers: int) -> None:
        """``workers``: how many share a machine."""
        workers *= processor.machines
        self.costs = not processor.free
        """Whether anything takes time."""
        self.seconds = 0.0
        """Seconds of a core that all together has taken so far."""
        self.of_flow = 0.0
        """What the flow that computed last has asked for."""
        self._clock, self._processor = clock, processor
        self._alone = min(1.0, processor.cores / workers)
        self._shared = Shared(clock, processor.cores / workers, 1.0, equal=1e-12)
        self._asked, self._quiet = 0.0, False

    # -- what is asked for ------------------------------------------------------------------------------------------

    @contextmanager
    def kernel(self, name: str, nbytes: int) -> Iterator[None]:
        """A kernel is called; operations on tensors inside of it are its own."""
        if not self._quiet:
            self._asked += nbytes / self._speed(name)
        before, self._quiet = self._quiet, True
        try:
            yield
        finally:
            self._quiet = before

    @property
    def asked(self) -> float:
        """Seconds that were asked for since they were last worked off; inside :meth:`counted`, by the flow alone."""
        return self._asked

    def ask(self, seconds: float) -> None:
        """Ask for so many seconds."""
        self._asked += seconds

    def ignore(self, whether: bool) -> None:
        """From now on, count nothing: the time of what comes is known."""
        self._quiet = whether

    def wrote(self, func: Any, written: Any) -> None:
        """PyTorch's operation ``func`` has written these tensors."""
        if self._quiet or any(func.__name__.startswith(name) for name in _MAKES_NOTHING):
            return
        tensors = written if isinstance(written, list | tuple) else [written]
        nbytes = sum(each.numel() * each.element_size() for each in tensors if isinstance(each, torch.Tensor) and each.is_meta)
        self._asked += nbytes / (self._speed("1 % largest, encode") if func is _TOP_K else self._processor.copy)

    def counted(self, go_on: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """The same, called by a flow and not by the loop: ``of_flow`` is what it then has asked for."""

        def call(reply: Any) -> Any:
            asked, quiet = self._asked, self._quiet
            self._asked, self._quiet = 0.0, False
            try:
                return go_on(reply)
            finally:
                self.of_flow, self._asked, self._quiet = self._asked, asked, quiet

        return call

    def _speed(self, name: str) -> float:
        speed = self._processor.kernels.get(name)
        return self._processor.copy * SHARES_OF_COPY[name] if speed is None else speed

    # -- what is done -----------------------------------------------------------------------------------------------

    def serve(self, seconds: float) -> Event:
        """So many seconds of a core; the event is their end."""
        self.seconds += seconds
        done = Event()
        self._shared.serve(seconds, done.set)
        return done

    def transport(self, nbytes: int, messages: int) -> Event:
        """The network's own work for an operation that sends, and receives, so much."""
        return self.serve(nbytes / self._processor.transport + messages * self._processor.message)

    def compute(self, seconds: float) -> None:
        """Let the time pass in which the loop computes, for so long while nothing else is done."""
        if self.costs and self._processor.computes:
            self._until(seconds * self._alone)
        else:
            self._clock.advance(self._clock.now + seconds)

    def work_off(self) -> None:
        """Let the time pass that the loop has asked for."""
        seconds, self._asked = self._asked, 0.0
        if seconds > 0:
            self.seconds += seconds
            self._until(seconds)

    def _until(self, seconds: float) -> None:
        done = Event()
        self._shared.serve(seconds, done.set)
        self._clock.run_until(lambda: done.happened)
        self._clock.advance(self._clock.now)
