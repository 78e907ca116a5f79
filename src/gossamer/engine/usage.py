"""Usage: which parameters have a gradient on any rank. A parameter that has none anywhere must keep none everywhere."""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.bucket_plan import Routing

USAGE = "(use of parameters)"
"""The name under which one number per parameter travels in a bucket: greater than zero if a rank has its gradient."""


def with_usage(tensors: Mapping[str, Tensor], routing: Routing) -> dict[str, Tensor]:
    """``tensors``, and among them the numbers of their use, in the last bucket that is averaged exactly, if there is one.

    Alone they would cost a few messages in every step: with many small steps on a fast network, some percent of them.
    """
    like = next((tensor for tensor in reversed(list(tensors.values())) if _fits(tensor, len(tensors), routing)), None)
    if like is None:
        return dict(tensors)
    result: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        # Before the last one: behind it they might have to make a bucket of their own.
        if tensor is like:
            result[USAGE] = torch.empty(len(tensors), dtype=like.dtype, device=like.device)
        result[name] = tensor
    return result


def _fits(tensor: Tensor, count: int, routing: Routing) -> bool:
    """Whether ``count`` numbers like this tensor go where it goes, which may depend on how many they are, and exactly."""
    handler = routing.route(USAGE, torch.empty(count, dtype=tensor.dtype, device="meta"))
    return tensor.is_floating_point() and routing.route("", tensor) == handler and handler.traits.exact
