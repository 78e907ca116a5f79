"""Line search: an optimizer that looks at the loss must see the same on all ranks, or it goes another way on each."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from gossamer.comm.runner import Runner
from gossamer.sync.module_buffers import average


def decides_by_loss(optimizer: Optimizer) -> bool:
    """Whether the loss that a closure returns decides how often, and where, the optimizer evaluates it again."""
    return isinstance(getattr(optimizer, "inner", optimizer), LBFGS)


def with_mean_loss(runner: Runner, closure: Callable[[], Any]) -> Callable[[], Any]:
    """A closure whose loss is the mean over all ranks, of which the gradients are the gradients. Collective when called."""

    def averaged() -> Any:
        loss = closure()
        if not isinstance(loss, (Tensor, int, float)):
            return loss
        mean = torch.as_tensor(loss).detach().to(torch.float64).reshape(1).clone()
        average(runner, [mean], "the mean loss of a closure")
        return mean.to(loss.dtype).reshape(loss.shape) if isinstance(loss, Tensor) else float(mean)

    return averaged
