"""Finiteness: whether tensors hold inf or NaN."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gossamer.memory import has_values


def any_non_finite(tensors: list[Tensor]) -> Tensor:
    """``float32[1]`` on the host: 1 if any element of the floating-point tensors that have values is inf or NaN."""
    some = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 0 and has_values(tensor)]
    if not some:
        return torch.zeros(1, dtype=torch.float32)
    if all(tensor.device.type == "cpu" for tensor in some) and torch.stack(torch._foreach_norm(some, 2)).isfinite().all():
        return torch.zeros(1, dtype=torch.float32)  # thirty times as fast; squares that overflow are looked at again
    return where_they_are(some).to("cpu")


def where_they_are(tensors: Sequence[Tensor]) -> Tensor:
    """The same on the tensors' device (one for all), so that nobody waits for it. They are floating-point and not empty."""
    # A non-finite element makes the maximum norm non-finite, in one pass and without a temporary of the tensor's size.
    finite = torch.stack([torch.isfinite(norm) for norm in torch._foreach_norm(list(tensors), float("inf"))])
    return (~finite).any().to(torch.float32).reshape(1)
