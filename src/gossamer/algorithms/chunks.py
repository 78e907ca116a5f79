"""Chunks: the largest of them, and the dense tensor into which those are packed."""

import math

import torch
from torch import Tensor


def pack(flat: Tensor, chosen: Tensor, chunk: int) -> Tensor:
    """The chosen chunks, one after the other; the last one of a tensor may be filled up with zeros."""
    whole = flat.numel() // chunk
    packed = flat[: whole * chunk].view(-1, chunk)[chosen[chosen < whole].to(flat.device)].view(-1)
    if chosen.numel() * chunk == packed.numel():
        return packed
    return torch.cat([packed, flat[whole * chunk :], flat.new_zeros(-flat.numel() % chunk)])


def put(packed: Tensor, chosen: Tensor, chunk: int, flat: Tensor) -> None:
    """Write packed chunks to their places in ``flat``."""
    whole = flat.numel() // chunk
    rows, places = packed.view(-1, chunk), chosen[chosen < whole].to(flat.device)
    flat[: whole * chunk].view(-1, chunk)[places] = rows[: places.numel()]
    if places.numel() < chosen.numel():
        flat[whole * chunk :] = rows[-1, : flat.numel() - whole * chunk]


def evenly(numel: int, count: int) -> Tensor:
    """A mask with ``count`` of ``numel`` set, evenly spread: the choice without values."""
    places = torch.arange(numel)
    return (places * count) // max(numel, 1) != ((places + 1) * count) // max(numel, 1)


def largest(norms: Tensor, count: int) -> Tensor:
    """A mask with the ``count`` largest set; of equal ones the first. NaN counts as largest."""
    mask = torch.zeros(norms.numel(), dtype=torch.bool)
    order = norms.nan_to_num(nan=math.inf, posinf=math.inf).argsort(descending=True, stable=True)
    mask[order[:count]] = True
    return mask
