"""Nested steps: those for which torch calls hooks, and that are not a step of the user's.

A subclass of an optimizer that has a ``step`` of its own, and calls ``super().step()`` in it, passes two functions that
torch has wrapped, each for its class, and each wrapper calls all hooks. And ``torch.distributed.checkpoint`` takes a step with
zeros for gradients where it needs to know what an optimizer will keep (``get_state_dict``, ``set_state_dict``).
"""

import sys
from types import CodeType

from torch.optim import Optimizer

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
