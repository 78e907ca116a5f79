"""Adam: what its relatives share, the check of their options and the step before any rate."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.wide import check_number


def check_adam(options: Mapping[str, Any]) -> None:
    """Raise ConfigurationError unless ``lr``, ``eps``, ``weight_decay`` and ``betas`` are in their ranges."""
    for name in ("lr", "eps", "weight_decay"):
        check_number(name, options[name])
    betas = options["betas"]
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise ConfigurationError(f"betas must be two numbers; got {betas!r}")
    for name, beta in zip(("the first of betas", "the second of betas"), betas, strict=True):
        check_number(name, beta, below=1.0)


def adam_steps(
    group: Mapping[str, Any],
    means: list[Tensor],
    squares: list[Tensor],
    gradients: list[Tensor],
    counts: Sequence[int],
    *,
    corrected: bool = True,
    shares: Sequence[float] | None = None,
) -> list[Tensor]:
    """m̂ / (√v̂ + eps) as new tensors, after m and v have taken in the gradients.

    ``corrected``: for the bias of their zero start. ``shares``: of each v, how much the gradient's square has; m̂'s has the
    rest. Without them v is of the gradient's alone.
    """
    first, second = group["betas"]
    torch._foreach_lerp_(means, gradients, 1 - first)
    steps = list(torch._foreach_div(means, [1 - first**t if corrected else 1.0 for t in counts]))
    torch._foreach_mul_(squares, second)
    shares = [1.0] * len(squares) if shares is None else shares
    torch._foreach_addcmul_(squares, gradients, gradients, [(1 - second) * share for share in shares])
    if any(share < 1 for share in shares):
        torch._foreach_addcmul_(squares, steps, steps, [(1 - second) * (1 - share) for share in shares])
    roots = torch._foreach_sqrt(squares)
    torch._foreach_div_(roots, [(1 - second**t) ** 0.5 if corrected else 1.0 for t in counts])
    torch._foreach_add_(roots, group["eps"])
    torch._foreach_div_(steps, roots)
    return steps
