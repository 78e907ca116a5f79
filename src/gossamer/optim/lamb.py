"""LAMB: Adam in which every layer has its own learning rate."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.checks import is_number
from gossamer.errors import ConfigurationError
from gossamer.optim.adam import adam_steps, check_adam
from gossamer.optim.layerwise import Layerwise, check_adapt, pick, scale, trust_ratios


class LAMB(Layerwise):
    """Layer-wise adaptive moments, for large batches of what Adam trains (attention models above all).

    For a weight tensor w with gradient g, at its t-th update::

        m ← β₁·m + (1 − β₁)·g              m̂ = m / (1 − β₁ᵗ)
        v ← β₂·v + (1 − β₂)·g²             v̂ = v / (1 − β₂ᵗ)
        u = m̂ / (√v̂ + eps) + weight_decay·w
        w ← w − lr · clip(‖w‖ / ‖u‖) · u

    Tensors that are not adapted (``adapt``: None leaves out those with fewer than two dimensions, True none, False
    all) take the ratio 1 and no weight decay, which is Adam. The ratio is 1, too, where ‖w‖ or ‖u‖ is zero.

    Args:
        params: parameters or groups; every option may differ between groups.
        lr: learning rate; with :func:`warmup`.
        betas: β₁ and β₂.
        eps: added to the root.
        weight_decay: decoupled as in AdamW, but inside the ratio.
        bias_correction: False takes m̂ = m and v̂ = v.
        trust_clip: bounds of the ratio, ``(low, high)``; none by default.
        adapt: which tensors have a rate of their own, see above.

    Raises:
        ConfigurationError: an option out of its range.

    Source: You et al. 2019 (arXiv 1904.00962), algorithm 2 with φ(z) = z; the paper bounds φ, ``trust_clip`` the ratio,
    as later implementations do.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.0,
        bias_correction: bool = True,
        trust_clip: tuple[float, float] | None = None,
        adapt: bool | None = None,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        options |= {"bias_correction": bias_correction, "trust_clip": trust_clip, "adapt": adapt}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own. Raises ConfigurationError for options out of range."""
        options = self.defaults | param_group
        check_adam(options)
        check_adapt(options["adapt"])
        _check_clip(options["trust_clip"])
        super().add_param_group(param_group)

    def update(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: list[bool]) -> None:
        kept = self.remembered("exp_avg", parameters), self.remembered("exp_avg_sq", parameters)
        steps = adam_steps(group, *kept, gradients, self.count(), corrected=group["bias_correction"])
        if group["weight_decay"] and any(adapted):
            torch._foreach_add_(pick(steps, adapted), pick(parameters, adapted), alpha=group["weight_decay"])
        low, high = group["trust_clip"] or (0.0, float("inf"))
        ratios = trust_ratios(parameters, steps, adapted, lambda w, u: (w / u).clamp(low, high))
        scale(steps, ratios)
        torch._foreach_mul_(steps, group["lr"])
        torch._foreach_sub_(parameters, steps)


def _check_clip(bounds: Any) -> None:
    if bounds is None:
        return
    are_two = isinstance(bounds, tuple | list) and len(bounds) == 2 and all(is_number(bound) for bound in bounds)
    if not (are_two and 0 <= bounds[0] <= bounds[1] and bounds[1] > 0):
        raise ConfigurationError(f"trust_clip must be None or (low, high) with 0 ≤ low ≤ high and high > 0; got {bounds!r}")
