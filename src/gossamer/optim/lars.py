"""LARS: momentum SGD in which every layer has its own learning rate."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from gossamer.optim.layerwise import Layerwise, check_adapt, pick, scale, trust_ratios
from gossamer.optim.wide import check_number


class LARS(Layerwise):
    """Layer-wise adaptive rate scaling, for batches of many thousand samples.

    For a weight tensor w with gradient g::

        λ = trust · ‖w‖ / (‖g‖ + weight_decay·‖w‖ + eps)
        v ← momentum·v + lr·λ·(g + weight_decay·w)
        w ← w − v

    Tensors that are not adapted (``adapt``: None leaves out those with fewer than two dimensions, True none, False
    all) take λ = 1 and no weight decay. λ is 1, too, where ‖w‖ or ‖g‖ is zero. As in the paper, and unlike
    ``torch.optim.SGD``, the learning rate stands inside v: what v has gathered keeps the rate it was gathered with.

    Args:
        params: parameters or groups; every option may differ between groups.
        lr: the global learning rate γ; rates of 1 to 30 are usual, since λ is small. With :func:`warmup`.
        momentum: m; 0 keeps no state.
        weight_decay: β.
        trust: the trust coefficient η.
        eps: keeps the ratio finite.
        adapt: which tensors have a rate of their own, see above.

    Raises:
        ConfigurationError: an option out of its range.

    Source: You, Gitman, Ginsburg 2017 (arXiv 1708.03888), algorithm 1, without its decay of γ.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust: float = 0.001,
        eps: float = 1e-8,
        adapt: bool | None = None,
    ) -> None:
        options = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps, "adapt": adapt}
        super().__init__(params, options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own. Raises ConfigurationError for options out of range."""
        options = self.defaults | param_group
        for name in ("lr", "weight_decay", "trust", "eps"):
            check_number(name, options[name])
        check_number("momentum", options["momentum"], below=1.0)
        check_adapt(options["adapt"])
        super().add_param_group(param_group)

    def update(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: list[bool]) -> None:
        decay, trust, eps = group["weight_decay"], group["trust"], group["eps"]
        ratios = trust_ratios(parameters, gradients, adapted, lambda w, g: trust * w / (g + decay * w + eps))
        steps = [gradient.clone() for gradient in gradients]  # p.grad stays as it is
        if decay and any(adapted):
            torch._foreach_add_(pick(steps, adapted), pick(parameters, adapted), alpha=decay)
        scale(steps, ratios)
        torch._foreach_mul_(steps, group["lr"])
        if group["momentum"]:
            velocities = self.remembered("momentum_buffer", parameters)
            torch._foreach_mul_(velocities, group["momentum"])
            torch._foreach_add_(velocities, steps)
            steps = velocities
        torch._foreach_sub_(parameters, steps)
