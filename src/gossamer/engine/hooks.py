"""Hooks that a replica leaves in a model or an optimizer."""

from collections.abc import Callable
from typing import Any

from torch import nn

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
