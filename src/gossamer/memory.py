"""Memory: where a tensor lies, tensors that are used again in every step, and how much of one to work on at a time."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def on_host(tensor: Tensor) -> bool:
    """Whether a tensor lies in the host's memory. One on ``meta`` lies nowhere, and is handled as if it did."""
    return tensor.device.type in ("cpu", "meta")


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor has values to look at, or (on ``meta``) only a shape and a type."""
    return not tensor.is_meta


def portion(tensor: Tensor) -> int:
    """How many elements to work on at a time: a CPU keeps so many, and what is made of them, in its cache; others take all."""
    return _PORTION if tensor.device.type == "cpu" else max(_PORTION, tensor.numel())


def portions(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same elements of flat tensors of one length, a :func:`portion` at a time: views."""
    if tensors[0].numel() <= portion(tensors[0]):
        return iter([tensors])
    return zip(*(tensor.split(portion(tensors[0])) for tensor in tensors), strict=True)


_PORTION = 2**16


def is_momentary(numel: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether :func:`momentary` has memory for a tensor of so many elements."""
    return device.type == "cpu" and numel * dtype.itemsize <= _MOMENTARY


def momentary(numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised flat tensor, for as long as anybody looks at it.

    On the host it is the same memory of this thread each time (why: see :class:`gossamer.buckets.Memory`), once nobody looks at
    it any more and as long as that suffices; unless it is a lot.
    """
    if not is_momentary(numel, dtype, device):
        return torch.empty(numel, dtype=dtype, device=device)
    nbytes = numel * dtype.itemsize
    kept: Tensor | None = getattr(_of_thread, "memory", None)
    if kept is None or kept.numel() < nbytes or not is_alone(kept):
        kept = _of_thread.memory = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    return kept[:nbytes].view(dtype)


_MOMENTARY = 2**22
_of_thread = threading.local()


def wide(tensor: Tensor) -> Tensor:
    """The tensor in at least full precision, itself if it is that already: sums of half-precision ones need it."""
    return tensor.to(widened(tensor.dtype))


def widened(dtype: torch.dtype) -> torch.dtype:
    """The type of :func:`wide` tensors that were of this one."""
    return torch.promote_types(dtype, torch.float32)


def as_real(tensor: Tensor) -> Tensor:
    """A complex tensor as a view of its real numbers, ``[…, 2]``; any other as it is."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def stored(tensor: Tensor) -> list[Tensor]:
    """The plain tensors that hold what a tensor is made of: itself, or of a subclass that wraps others (weights kept in few
    bits, and their scales), as it names them in ``__tensor_flatten__``."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    names, _ = tensor.__tensor_flatten__()
    inside = [getattr(tensor, name) for name in names]  # a DTensor names its mesh too
    return [plain for each in inside if isinstance(each, Tensor) for plain in stored(each)]


def is_stored(tensor: Tensor) -> bool:
    """Whether all of :func:`stored` have memory, or need none; a subclass that wraps others and does not name them has none."""
    return all(plain.is_meta or not plain.numel() or plain.data_ptr() != 0 for plain in stored(tensor))


def reused(old: Tensor | None, like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """An uninitialised tensor like ``like``, of type ``dtype`` if that is given: ``old``, if that fits and nobody uses it any
    more."""
    dtype = like.dtype if dtype is None else dtype
    if old is None or not is_alone(old):
        return torch.empty_like(like, dtype=dtype)
    fits = old.shape == like.shape and old.dtype == dtype and old.device == like.device
    return old if fits else torch.empty_like(like, dtype=dtype)


def is_alone(tensor: Tensor) -> bool:
    """Whether the tensor lives on the host, and no other one shares its memory."""
    if tensor.device.type != "cpu":
        return False
    storage = tensor.untyped_storage()
    count: Any = getattr(torch._C, "_storage_Use_Count", None)
    return count is not None and count(storage._cdata) == 2  # the tensor, and the object that was just asked for
