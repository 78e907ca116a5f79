"""Pieces: tensors cut into as many even parts as an algorithm takes in turn; each piece is a view with a name of its own."""

import re
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

OF = " of "
"""In the name of what an optimizer remembers of a weight: ``"exp_avg of 0.weight"``."""

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "acc_delta", "exp_inf")
"""What torch's optimizers call sums, means and bounds of squares or magnitudes."""

_PIECE = re.compile(r"(.*) \[part (\d+)\]", re.DOTALL)


def piece_name(name: str, part: int) -> str:
    """The name of what of a tensor belongs to a part."""
    return f"{name} [part {part}]"


def part_of(name: str) -> tuple[str, int | None]:
    """The reverse: the tensor's name, and the part; None for what is not cut."""
    found = _PIECE.fullmatch(name)
    return (name, None) if found is None else (found[1], int(found[2]))


def cut(tensors: Mapping[str, Tensor], parts: int, weight_of: Callable[[str], str] = str) -> dict[str, Tensor]:
    """``tensors`` laid end to end and cut into ``parts`` of the same number of elements; by name and part, in order.

    A piece has as many dimensions as its tensor, all but the last of size 1: biases and matrices can still be told apart.
    What is remembered of a weight (its name is ``weight_of(name)``) is cut where the weight is. A tensor that does not fill
    its memory densely is not cut and belongs to the part of its first element. With one part, they are what they were.
    """
    if parts == 1:
        return dict(tensors)
    owners = {name: owner if (owner := weight_of(name)) in tensors else name for name in tensors}
    offsets: dict[str, int] = {}
    total = 0
    for name, tensor in tensors.items():
        if owners[name] == name:
            offsets[name] = total
            total += tensor.numel()
    ends = [total * (part + 1) // parts for part in range(parts)]
    pieces: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        pieces |= _pieces(name, tensor, offsets[owners[name]], ends)
    return pieces


def _pieces(name: str, tensor: Tensor, begin: int, ends: list[int]) -> dict[str, Tensor]:
    """The non-empty parts of one tensor whose first element is the ``begin``-th."""
    first = next((part for part, end in enumerate(ends) if begin < end), len(ends) - 1)
    last = next((part for part, end in enumerate(ends) if begin + tensor.numel() <= end), len(ends) - 1)
    if first == last or not _dense(tensor):
        return {piece_name(name, first): tensor}
    flat = tensor.detach().as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    bounds = [0, *(ends[part] - begin for part in range(first, last)), tensor.numel()]
    shape = *(1,) * (tensor.ndim - 1), -1
    return {piece_name(name, first + i): flat[bounds[i] : bounds[i + 1]].view(shape) for i in range(last - first + 1)}


def _dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense(tensor))
