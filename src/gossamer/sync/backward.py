"""Backward pass: where it begins, where it ends, and whether it is to be synchronised."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from gossamer.comm.runner import Runner
from gossamer.errors import CommunicationError, GossamerError, UsageError

current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that is under way."""


@contextmanager
def alarming(runner: Runner) -> Iterator[None]:
    """Tell the other ranks about an error of this rank's own, so that none of them waits in vain."""
    try:
        yield
    except CommunicationError:
        raise
    except Exception as error:
        runner.alarm(in_words(runner.rank, error))
        raise


def give_up(runner: Runner, error: BaseException) -> None:
    """Leave because of an error, which the others are told of."""
    runner.alarm(in_words(runner.rank, error))
    runner.close(graceful=False)


def in_words(rank: int, error: BaseException) -> str:
    """What a rank tells the others of an error that ends its part. Those of ours say by themselves where they arose."""
    if isinstance(error, GossamerError):
        return str(error)
    return f"rank {rank}: {type(error).__name__}: {error}".removesuffix(": ")


class Backward:
    """Watches the backward passes of one model: ``on_begin`` at its first gradient, ``on_end`` when it is over.

    ``passes`` counts all that reached a parameter, ``synchronised_passes`` those outside of ``no_sync()``.
    """

    def __init__(self, runner: Runner, on_begin: Callable[[], None], on_end: Callable[[], None]) -> None:
        self.synchronise = True
        self.passes = 0
        self.synchronised_passes = 0
        self._runner, self._on_begin, self._on_end = runner, on_begin, on_end
        self.task: int | None = None
        """The number of the synchronised backward pass that is under way."""
        self._unsynchronised_task = -1

    def reached(self) -> bool:
        """Called by every gradient hook; whether this gradient is to be communicated."""
        task = current_task()
        if task == self.task:
            return True
        if not self.synchronise:
            self._note_unsynchronised(task)
            return False
        with alarming(self._runner):
            self._begin(task)
        return True

    def note_gradient(self) -> Callable[[Tensor], None]:
        """The hook of a parameter whose gradient is not exchanged: it only notices the pass."""

        def on_gradient(parameter: Tensor) -> None:
            """A hot path: runs once per parameter and backward pass."""
            if self.task != current_task():
                self.reached()

        return on_gradient

    def _note_unsynchronised(self, task: int) -> None:
        if task != self._unsynchronised_task:
            self._unsynchronised_task = task
            self.passes += 1

    def _begin(self, task: int) -> None:
        if inside_reentrant_checkpoint():
            raise UsageError(
                f"rank {self._runner.rank}: reentrant activation checkpointing runs a backward inside a backward, so "
                "gradients come twice and ends come early; use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
        if self.task is not None and self._runner.world > 1:  # alone, nobody waits for what an error has ended half-way
            raise UsageError(
                f"rank {self._runner.rank}: the previous backward pass has not ended: it raised an error half-way through its "
                "exchange, or this one runs inside it; the ranks can no longer be matched, so this run cannot go on"
            )
        self.task = task
        self._on_begin()
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._end, task))

    def _end(self, task: int) -> None:
        with alarming(self._runner):
            if task != self.task:
                raise UsageError(f"rank {self._runner.rank}: another backward pass ran inside this one, and took its place")
            self._on_end()
        self.task = None
        self.passes += 1
        self.synchronised_passes += 1


def inside_reentrant_checkpoint() -> bool:
    """Whether the current backward was started by the backward of a reentrant checkpoint."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and frame.f_code.co_filename.endswith("utils/checkpoint.py"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
