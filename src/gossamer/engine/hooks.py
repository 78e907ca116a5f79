"""Hooks that a replica leaves in a model or an optimizer, and in which backward pass they are called."""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.comm.device import on_host

_DDP = nn.parallel.DistributedDataParallel


class OwnHook:
    """Calls ``call`` with whatever the hook is given; on a copy or pickle of what it hangs on, which trains alone, nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type["OwnHook"], tuple[()]]:
        return OwnHook, ()


class InsideDDP(OwnHook):
    """Calls until ``call`` has returned True once, and whenever torch's DDP computes: what torch notes of that is all that a
    forward pass costs otherwise."""

    done = False

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        if not self.done or _DDP._active_ddp_module is not None:
            self.done = bool(super().__call__(*args, **kwargs)) or self.done


current_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward pass that this thread runs; -1 outside of any."""

_RUN_BACKWARD = torch.autograd.graph._engine_run_backward.__code__


def _depth() -> int:
    """How many backward passes this thread has called from Python and not left."""
    found, frame = 0, sys._getframe()
    while frame is not None:
        found += frame.f_code is _RUN_BACKWARD
        frame = frame.f_back  # type: ignore[assignment]
    return found


def is_nested(parameter: Tensor) -> bool:
    """Whether the pass that has reached ``parameter`` was called inside another one.

    Passes over tensors of a device run in a thread of the engine, in which the outermost call is not on the stack.
    """
    return _depth() > on_host(parameter)
