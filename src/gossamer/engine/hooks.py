"""Hooks that a replica leaves in a model or an optimizer."""

from collections.abc import Callable
from typing import Any


class OwnHook:
    """Calls ``call`` with whatever the hook is given; on a copy or pickle of what it hangs on, which trains alone, nothing."""

    def __init__(self, call: Callable[..., Any] | None = None) -> None:
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return None if self._call is None else self._call(*args, **kwargs)

    def __reduce__(self) -> tuple[type["OwnHook"], tuple[()]]:
        return OwnHook, ()
