"""Parts: what this rank holds of tensors that are sharded (DTensors), for what changes each element by itself."""

from collections.abc import Iterable
from typing import Any

from torch import Tensor


def own(tensors: Iterable[Tensor]) -> list[Tensor]:
    """What this rank holds of each; any but a DTensor itself."""
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]


def placed_as(gradient: Any, weight: Any) -> Any:
    """A gradient, sharded as its weight is: one may come as sums that are still to be made over the mesh."""
    placements = getattr(weight, "placements", None)
    return gradient if getattr(gradient, "placements", None) == placements else gradient.redistribute(placements=placements)
