"""Nested steps: one step of the user's for which torch calls hooks twice.

A subclass of an optimizer that has a ``step`` of its own, and calls ``super().step()`` in it, passes two functions that
torch has wrapped, each for its class, and each wrapper calls all hooks.
"""

import sys
from types import CodeType

from torch.optim import Optimizer

_WRAPPER: CodeType = Optimizer.profile_hook_step(lambda optimizer: None).__code__


def in_nested_step(optimizer: Optimizer) -> bool:
    """Asked in a hook on the optimizer's step: whether it is called for a ``step`` inside of another one.

    From the stack, because a count of what has begun would stay wrong after a step that an error ended.
    """
    if sum(hasattr(vars(each).get("step"), "hooked") for each in type(optimizer).__mro__) < 2:
        return False
    found, frame = 0, sys._getframe(1)
    while frame is not None and found < 2:
        if frame.f_code is _WRAPPER and frame.f_locals["args"][0] is optimizer:
            found += 1
        frame = frame.f_back  # type: ignore[assignment]
    return found > 1


in_nested_step._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets
