"""Hooks that a replica leaves in a model or an optimizer, and what they are called in: a backward pass, a step.

Torch calls hooks for steps that are not the user's. A subclass of an optimizer that has a ``step`` of its own, and calls
``super().step()`` in it, passes two functions that torch has wrapped, each for its class, and each wrapper calls all hooks. And
``torch.distributed.checkpoint`` takes a step with zeros for gradients where it needs to know what an optimizer will keep
(``get_state_dict``, ``set_state_dict``).
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.memory import on_host

_DDP = nn.parallel.DistributedDataParallel


class OwnHook:
    """Calls ``call`` with whatever the hook is given; on a copy or pickle of what it hangs on, which trains alone, nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type["OwnHook"], tuple[Any, ...]]:
        return OwnHook, ()


class CopiedHook(OwnHook):
    """One that a copy or pickle has as well: it does a part of what the optimizer does, for as long as that is lent."""

    def __reduce__(self) -> tuple[type[OwnHook], tuple[Any, ...]]:
        return CopiedHook, (self._call,)


def come_last(optimizer: Optimizer, handle: Any) -> None:
    """Call a hook before the optimizer's step after those of others, whenever these were registered; what does a part of the
    step follows it, which asks for gradients."""
    hooks: Any = optimizer._optimizer_step_pre_hooks
    for key in (handle.id, *[key for key, hook in hooks.items() if isinstance(hook, CopiedHook)]):
        hooks.move_to_end(key)


@contextmanager
def only_own_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Inside, a part of a step is taken: hooks of the user's, which belong to the whole step, are not called."""

    def own(hooks: Any) -> Any:
        return OrderedDict((key, hook) for key, hook in hooks.items() if isinstance(hook, OwnHook))

    pre, post = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = own(pre), own(post)
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post


def before_gradients_are_used(
    call: Callable[[], None], optimizer: Optimizer, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, dict[str, Any]] | None:
    """A hook before an optimizer's step, which calls ``call`` when the gradients are there: after the closure, if any."""
    closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
    if closure is None:
        call()
        return None

    def evaluated() -> Any:
        loss = closure()
        call()
        return loss

    return args[:1], {**kwargs, "closure": evaluated}


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


_WRAPPER: CodeType = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def in_nested_step(optimizer: Optimizer) -> bool:
    """Asked in a hook on the optimizer's step: whether it is called for a ``step`` inside of another one, or for none of the
    user's.

    From the stack, because a count of what has begun would stay wrong after a step that an error ended.
    """
    if _of_a_checkpoint():
        return True
    if sum(hasattr(vars(each).get("step"), "hooked") for each in type(optimizer).__mro__) < 2:
        return False
    found, frame = 0, sys._getframe(1)
    while frame is not None and found < 2:
        if frame.f_code is _WRAPPER and frame.f_locals["args"][0] is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


in_nested_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets


def _of_a_checkpoint() -> bool:
    """Whether ``torch.distributed.checkpoint`` takes the step."""
    module = sys.modules.get("torch.distributed.checkpoint.state_dict")
    code = getattr(getattr(module, "_init_optim_state", None), "__code__", None)
    frame = None if code is None else sys._getframe(1)
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame is not None
