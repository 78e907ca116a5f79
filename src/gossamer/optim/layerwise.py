"""Layerwise optimizer: what LARS and LAMB share, a step size of its own for every tensor."""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gossamer.errors import ConfigurationError
from gossamer.optim.parts import own
from gossamer.optim.wide import Wide


class Layerwise(Wide):
    """Calls :meth:`update` once per parameter group, device and precision.

    The group option ``adapt`` says which tensors get a step size of their own, and weight decay: those with two or
    more dimensions (None, the default: the field leaves out biases and the scales of normalisation), all (True) or
    none (False).
    """

    @abstractmethod
    def update(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: list[bool]) -> None:
        """As :meth:`change`; ``adapted`` says which tensors get a step size of their own."""

    def change(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        self.update(
            group,
            parameters,
            gradients,
            [group["adapt"] is True or (group["adapt"] is None and p.dim() > 1) for p in parameters],
        )


def trust_ratios(
    weights: Sequence[Tensor], updates: Sequence[Tensor], adapted: Sequence[bool], ratio: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """One factor per tensor: ``ratio(‖w‖, ‖u‖)``, and 1 where a norm is zero or the tensor is not adapted."""
    mine, theirs = _norms(weights), _norms(updates)
    chosen = (mine > 0) & (theirs > 0)
    if not all(adapted):
        chosen &= torch.tensor(adapted).to(mine.device, non_blocking=True)
    return list(torch.where(chosen, ratio(mine, theirs), torch.ones_like(mine)).unbind())


def _norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of each; of sharded ones (DTensors) that of the whole, which takes one collective for all."""
    norms = torch.stack(torch._foreach_norm(list(tensors)))
    whole: Tensor = norms.full_tensor() if hasattr(norms, "full_tensor") else norms
    return whole


def scale(tensors: Sequence[Tensor], factors: Sequence[Tensor]) -> None:
    """Multiply each by its factor; of sharded ones what this rank holds."""
    torch._foreach_mul_(own(tensors), list(factors))


def pick(tensors: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """The chosen ones."""
    return [tensor for tensor, yes in zip(tensors, chosen, strict=True) if yes]


def check_adapt(value: Any) -> None:
    """Raise :class:`ConfigurationError` unless ``value`` is None, True or False."""
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"adapt must be None (tensors with two or more dimensions), True or False; got {value!r}")
