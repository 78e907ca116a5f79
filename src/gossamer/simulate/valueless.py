"""Valueless: what becomes of operations on ``meta`` tensors that write, or read, a value.

PyTorch checks and broadcasts shapes at each operation on ``meta``, in Python: 0.1 to 0.4 ms each. An operation that writes
into a tensor there changes nothing, so that nothing is to be checked; and one whose arguments look as they did before gives a
tensor that looks as it did. A number that is read there is 1: it makes a check
for finite values pass, and an optimizer that reads the size of something (Adafactor) go on.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_READ = torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default


class Valueless(TorchDispatchMode):
    """Inside, operations that write into tensors on ``meta`` return these as they are, and numbers read there are 1.

    ``wrote``: called with every operation, and what it has written.
    """

    def __init__(self, wrote: Callable[[Any, Any], None] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._wrote = wrote
        self._results: dict[Any, _Look] = {}
        """By operation and what its arguments look like: what its result does."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """PyTorch would wrap every call against compilation, which nothing here is part of: a third of its time."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kind = _KINDS.get(id(func)) or _kind_of(func)
        if kind.place is not None:
            written = (kwargs or {}).get("out") if kind.place == "out" else args[0]
            if _on_meta(written):
                if self._wrote is not None:
                    self._wrote(func, written)
                return None if isinstance(written, list | tuple) else written
        if kind.reads and _on_meta(args[0]):
            return torch.ones((), dtype=args[0].dtype).item()
        if kind.shows:
            return func(*args, **(kwargs or {}))
        result = self._made(func, args, kwargs or {})
        if self._wrote is not None:
            self._wrote(func, result)
        return result

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of an operation that makes a new tensor."""
        try:
            key = id(func), *map(_look, args), *[(name, _look(each)) for name, each in kwargs.items()]
            known = self._results.get(key)
        except TypeError:  # an argument that is not known by its value, or has one on another device
            return func(*args, **kwargs)
        if known is not None:
            shape, strides, dtype = known
            return torch.empty_strided(shape, strides, dtype=dtype, device="meta")
        result = func(*args, **kwargs)
        if type(result) is Tensor and result.is_meta:
            self._results[key] = result.shape, result.stride(), result.dtype
        return result


_Look = tuple[Sequence[int], Sequence[int], torch.dtype]


_PLAIN = frozenset({int, bool, float, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})


def _look(argument: Any) -> Any:
    """What of an argument decides what the result looks like. Raises TypeError for tensors that have values."""
    kind = type(argument)
    if kind in _PLAIN:
        return kind, argument
    if isinstance(argument, Tensor):
        if not argument.is_meta:
            raise TypeError("a tensor with values")
        return argument.shape, argument.stride(), argument.dtype
    if isinstance(argument, list | tuple):
        return tuple(map(_look, argument))
    return kind, argument


def _on_meta(written: Any) -> bool:
    first = written[0] if isinstance(written, list | tuple) and written else written
    return isinstance(first, Tensor) and first.is_meta


class _Kind(NamedTuple):
    """What kind of operation one is."""

    func: Any
    """The operation, kept: its id is the key."""
    place: str | None
    """Where it writes: into its ``"first"`` argument, into ``"out"``, or nowhere alone."""
    reads: bool
    """Whether it reads a value."""
    shows: bool
    """Whether it gives a view of what it was given."""


_KINDS: dict[int, _Kind] = {}
"""By the operation's id: PyTorch hashes operations in Python."""


def _kind_of(func: Any) -> _Kind:
    """As its schema says."""
    shows = any(each.alias_info is not None for each in func._schema.returns)
    kind = _KINDS[id(func)] = _Kind(func, _written(func), func in _READ, shows)
    return kind


def _written(func: Any) -> str | None:
    """Where an operation writes: into its ``"first"`` argument, into ``"out"``, or nowhere alone, as its schema says."""
    arguments = func._schema.arguments
    changed = [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]
    if len(changed) != 1 or "resize" in func.__name__:
        return None
    if changed == ["out"]:
        return "out"
    return "first" if changed[0] == arguments[0].name else None
