"""Loss scaling: all ranks skip a step together, and what is owed follows the scale."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.ops import maximum
from gossamer.comm.runner import Runner


def agree_on_overflow(runner: Runner, scaler: Any, owners: Sequence[Iterable[Parameter]]) -> None:
    """If any rank has a non-finite gradient, write inf into every rank's gradients, so that every GradScaler skips.

    ``owners``: the parameters of each optimizer. It is agreed for each of them, as the scaler skips for each: gradients that
    one has left from its own turn do not make another one skip.
    """
    if scaler is None or not scaler.is_enabled() or runner.world == 1:
        return
    gradients = [[_values(p.grad) for p in parameters if p.grad is not None] for parameters in owners]
    found = torch.cat(list(map(any_non_finite, gradients)))
    overflow = runner.run(lambda: maximum(found, runner.world), "the agreement on overflow")
    for of_one, broken in zip(gradients, overflow.tolist(), strict=True):
        if broken > 0 and of_one:
            torch._foreach_add_(of_one, float("inf"))


def _values(gradient: Tensor) -> Tensor:
    """What a gradient consists of; of a sparse one its values, which may be several for one place."""
    return gradient.detach()._values() if gradient.is_sparse else gradient.detach()


class LossScale:
    """By what the loss is scaled: what is owed is owed in the units of the gradients, which change with it."""

    def __init__(self, scaler: Any) -> None:
        self.scaler = scaler
        self._last: Tensor | None = None
        """In the last backward pass, and so of what is owed; where the scaler has it."""

    @property
    def on(self) -> bool:
        """Whether it is scaled at all."""
        return self.scaler is not None and bool(self.scaler.is_enabled())

    def follow(self, rescale: Callable[[Tensor], None] | None) -> None:
        """A backward pass begins: ``rescale`` what is owed (if anything is) by what gradients have grown by, ``float32[]``."""
        if not self.on:
            return
        before, self._last = self._last, scale_of(self.scaler)
        if before is not None and rescale is not None:
            before = before.to(self._last.device)
            known = (before > 0) & (self._last > 0)
            rescale(torch.where(known, self._last / before, 1.0))

    def saved(self) -> float:
        """For a state: that of what is owed; 1 if it is not scaled."""
        return 1.0 if self._last is None else float(self._last)

    def load(self, saved: float | None, rescale: Callable[[Tensor], None] | None) -> None:
        """What was loaded is owed in units of the scale that it was ``saved`` with (None: it does not say)."""
        self._last = torch.tensor(saved) if saved is not None and self.on else None
        if saved is not None and not self.on and rescale is not None:
            rescale(torch.tensor(1 / saved))


def scale_of(scaler: Any) -> Tensor:
    """The scale, ``float32[]``, where the scaler has it: to read it on a device the host would have to wait."""
    ask = getattr(scaler, "_get_scale_async", None)
    there = None if ask is None else ask()
    return torch.tensor(float(scaler.get_scale())) if there is None else there.detach().clone().reshape(())


def any_non_finite(tensors: list[Tensor]) -> Tensor:
    """``float32[1]`` on the host: 1 if any element of the floating-point tensors is inf or NaN."""
    some = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.numel() > 0]
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
