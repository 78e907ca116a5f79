"""Ties: several names of the same memory. What is added to a weight must be added once, however many names it has.

``a.data = b.data`` ties two parameters by their memory, and a buffer may be a view of another one.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from gossamer.bucket_plan import is_buffer, name_of_buffer
from gossamer.errors import ConfigurationError

Span = tuple[int, int, str]
"""The addresses at which a tensor begins and behind which it ends, and its name."""


def once(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``tensors`` without the ones that :func:`ties` names."""
    tied = ties(tensors)
    return {name: tensor for name, tensor in tensors.items() if name not in tied}


def ties(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Of several names of the same elements, in whatever shape, all but the first, each with that one.

    Raises:
        ConfigurationError: two tensors share some of their elements, and not all.
    """
    places = {name: number for number, name in enumerate(tensors)}
    found: dict[str, str] = {}
    for pair in _overlapping(tensors):
        first, other = sorted(pair, key=places.__getitem__)
        shared = _shared(tensors[first], tensors[other])
        if shared == "all":
            found.setdefault(other, first)
        elif shared:
            raise ConfigurationError(
                f"{called(first)} and {called(other)} share a part of their memory: what an exchange of weights brings would "
                "be added to it twice. Make one of them a tensor of its own (clone()), leave one out (ignore=), or exchange "
                "gradients"
            )
    return found


def overlapping(tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first two names whose memory overlaps."""
    return next(_overlapping(tensors), None)


def across(some: Collection[str], tensors: Mapping[str, Tensor]) -> tuple[str, str] | None:
    """The first two names of two tensors with elements in common, of which the first is among ``some``, and the second not."""
    two = (pair for pair in _overlapping(tensors) if tensors[pair[0]] is not tensors[pair[1]])
    apart = (pair for pair in two if (pair[0] in some) != (pair[1] in some))
    pairs = (pair if pair[0] in some else pair[::-1] for pair in apart if _shared(tensors[pair[0]], tensors[pair[1]]))
    return next(pairs, None)


def called(name: str) -> str:
    """A tensor that travels with the weights, in words."""
    return f"buffer {name_of_buffer(name)!r}" if is_buffer(name) else f"parameter {name!r}"


def _overlapping(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, str]]:
    """The pairs of names whose ranges of addresses overlap."""
    spans: dict[torch.device, list[Span]] = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            spans.setdefault(tensor.device, []).append((*_span(tensor), name))
    for of_device in spans.values():
        near: list[Span] = []
        for begin, end, name in sorted(of_device):
            near = [span for span in near if span[1] > begin]
            yield from ((other, name) for _, _, other in near)
            near.append((begin, end, name))


def _span(tensor: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _shared(a: Tensor, b: Tensor) -> str:
    """Which elements two tensors whose ranges overlap have in common: ``"all"``, ``"some"`` or ``""``."""
    if _dense(a) and _dense(b):
        return "all" if _span(a) == _span(b) else "some"
    size, begin = a.element_size(), min(a.data_ptr(), b.data_ptr())
    if b.element_size() != size or (a.data_ptr() - b.data_ptr()) % size:
        return "some"
    seen = torch.zeros((max(_span(a)[1], _span(b)[1]) - begin) // size, dtype=torch.bool)
    theirs = seen.as_strided(b.shape, b.stride(), (b.data_ptr() - begin) // size)
    seen.as_strided(a.shape, a.stride(), (a.data_ptr() - begin) // size).fill_(True)
    if theirs.all() and a.numel() == b.numel():
        return "all"
    return "some" if theirs.any() else ""


def _dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
