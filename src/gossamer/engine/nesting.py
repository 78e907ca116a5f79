"""Nesting: in which backward pass a thread is, and whether that was called inside another one."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from gossamer.comm.device import on_host

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
