"""Momentum on loan: taken out of an optimizer by an algorithm that accumulates it itself, and given back."""

from collections.abc import Sequence

from torch.optim import SGD, Optimizer

from gossamer.errors import ConfigurationError

_LENT = "momentum lent to gossamer"
"""The key in a param group: it is saved and loaded with the optimizer's state."""


def lend_momentum(optimizers: Sequence[Optimizer]) -> float:
    """Set the momentum of every param group to 0 and return what it was: one value, of plain SGD with momentum.

    Raises ConfigurationError for other optimizers, other kinds of momentum, or several values.
    """
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for optimizer in optimizers:
        if not isinstance(optimizer, SGD):
            raise ConfigurationError(
                f"momentum_correction replaces the momentum of torch.optim.SGD, not the moments of {type(optimizer).__name__}: "
                "leave it off"
            )
    values = {float(group.get(_LENT, group["momentum"])) for group in groups}
    if len(values) != 1 or values == {0.0}:
        raise ConfigurationError(f"momentum_correction needs one momentum above 0 in all param groups; got {sorted(values)}")
    if any(group["nesterov"] or group["dampening"] for group in groups):
        raise ConfigurationError("momentum_correction knows plain momentum only, without nesterov and dampening")
    (momentum,) = values
    for group in groups:
        group[_LENT], group["momentum"] = momentum, 0.0
    return momentum


def return_momentum(optimizers: Sequence[Optimizer]) -> None:
    """Undo :func:`lend_momentum`."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if _LENT in group:
                group["momentum"] = group.pop(_LENT)
