"""Loss scaling: all ranks skip a step together."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.ops import maximum
from gossamer.comm.runner import Runner


def agree_on_overflow(runner: Runner, scaler: Any, parameters: Iterable[Parameter]) -> None:
    """If any rank has a non-finite gradient, write inf into every rank's gradients, so that every GradScaler skips."""
    if scaler is None or not scaler.is_enabled() or runner.world == 1:
        return
    gradients = [parameter.grad.detach() for parameter in parameters if parameter.grad is not None]
    overflow = runner.run(lambda: maximum(any_non_finite(gradients), runner.world), "the agreement on overflow")
    if overflow.item() > 0 and gradients:
        torch._foreach_add_(gradients, float("inf"))


def scale_of(scaler: Any) -> Tensor:
    """The scale, ``float32[]``, where the scaler has it: to read it on a device the host would have to wait."""
    ask = getattr(scaler, "_get_scale_async", None)
    there = None if ask is None else ask()
    return torch.tensor(float(scaler.get_scale())) if there is None else there.detach().clone().reshape(())


def any_non_finite(tensors: list[Tensor]) -> Tensor:
    """``float32[1]`` on the host: 1 if any element of the floating-point tensors is inf or NaN."""
    some = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 0]
    if not some:
        return torch.zeros(1)
    if all(tensor.device.type == "cpu" for tensor in some) and torch.stack(torch._foreach_norm(some, 2)).isfinite().all():
        return torch.zeros(1)  # thirty times as fast; squares that overflow are looked at again
    return where_they_are(some).to("cpu")


def where_they_are(tensors: Sequence[Tensor]) -> Tensor:
    """The same on the tensors' device (one for all), so that nobody waits for it. They are floating-point and not empty."""
    # A non-finite element makes the maximum norm non-finite, in one pass and without a temporary of the tensor's size.
    finite = torch.stack([torch.isfinite(norm) for norm in torch._foreach_norm(list(tensors), float("inf"))])
    return (~finite).any().float().reshape(1)
