"""Momentum on loan: taken out of an optimizer by an algorithm that accumulates it itself, and given back.

An algorithm sees gradients, and not weights, so the momentum of what weight decay adds to them is accumulated here.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch.optim import SGD, Optimizer

from gossamer.errors import ConfigurationError
from gossamer.hooks import CopiedHook, before_gradients_are_used, in_nested_step
from gossamer.optim.loan import give_back, save_as_given

_LENT, _DECAY = "momentum lent to gossamer", "weight decay lent to gossamer"
_LOAN = {"momentum": _LENT, "weight_decay": _DECAY}

_DECAYING = "momentum of the weight decay"
"""The key in the optimizer's state of a parameter."""

_hooks: "WeakKeyDictionary[Optimizer, list[Any]]" = WeakKeyDictionary()

_stepped: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers that have taken a step since their momentum was lent."""


def lend_momentum(optimizers: Sequence[Optimizer]) -> float:
    """Set momentum and weight decay of every param group to 0, and return what the momentum was: one value, of plain SGD.
    What it has accumulated goes with the first step that is taken without it. A state that is saved holds them as they were,
    and one that is loaded lends them again.

    Raises ConfigurationError for other optimizers, other kinds of momentum, or several values.
    """
    for optimizer in optimizers:
        if not isinstance(optimizer, SGD):
            raise ConfigurationError(
                f"momentum_correction replaces the momentum of torch.optim.SGD, not the moments of {type(optimizer).__name__}: "
                "leave it off"
            )
    momentum = _lend([group for optimizer in optimizers for group in optimizer.param_groups])
    for optimizer in optimizers:
        if optimizer not in _hooks:
            _hooks[optimizer] = [
                optimizer.register_step_pre_hook(CopiedHook(_decay)),
                save_as_given(optimizer, _LOAN),
                optimizer.register_load_state_dict_post_hook(partial(_lend_loaded, momentum)),
            ]
    return momentum


def _lend(groups: Sequence[dict[str, Any]], wanted: float | None = None) -> float:
    """Take the momentum out of ``groups``, where it is not lent already; not if it is not ``wanted``. Returns what it is."""
    values = {float(group["momentum"] or group.get(_LENT, 0.0)) for group in groups}
    if len(values) != 1 or values == {0.0}:
        raise ConfigurationError(f"momentum_correction needs one momentum above 0 in all param groups; got {sorted(values)}")
    if any(group["nesterov"] or group["dampening"] for group in groups):
        raise ConfigurationError("momentum_correction knows plain momentum only, without nesterov and dampening")
    (momentum,) = values
    for group in groups if wanted in (None, momentum) else ():
        if group["momentum"]:
            group[_LENT], group["momentum"] = momentum, 0.0
            group[_DECAY], group["weight_decay"] = group["weight_decay"], 0.0
    return momentum


def _lend_loaded(momentum: float, optimizer: Optimizer) -> None:
    """Lend what was loaded, if it is what the algorithm has; if not, the next step is refused."""
    _lend(optimizer.param_groups, momentum)


def _decay(optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]] | None:
    """Before a step: what the weight decay does, beside what gradients do. A ``closure``, which makes them, comes first."""
    if in_nested_step(optimizer):
        return None
    _check_lent(optimizer)
    return before_gradients_are_used(partial(_apply_decay, optimizer), optimizer, args, kwargs)


def _check_lent(optimizer: Optimizer) -> None:
    """Refuse a momentum that is there again, and follow a weight decay that was set again (by a schedule of it)."""
    if any(_LENT not in group or group["momentum"] for group in optimizer.param_groups):
        raise ConfigurationError(
            "momentum_correction has taken the momentum out of the optimizer, and something has set one again, which would be "
            "applied twice: a schedule that cycles it (OneCycleLR and CyclicLR do; give them cycle_momentum=False), a loaded "
            "state with another momentum (load it before gossamer.replicate()), or an added param group"
        )
    for group in optimizer.param_groups:
        if group["weight_decay"]:
            group[_DECAY], group["weight_decay"] = group["weight_decay"], 0.0


@torch.no_grad()
def _apply_decay(optimizer: Optimizer) -> None:
    """v ← momentum·v + weight_decay·w, w ← w − lr·v: with what the gradients do, SGD with momentum and weight decay."""
    _stepped.add(optimizer)
    for state in optimizer.state.values():
        state.pop("momentum_buffer", None)  # or it would come back, as it is now, when the momentum is given back
    overflow = getattr(optimizer, "found_inf", None)  # from a GradScaler, to optimizers that skip the step by themselves
    if overflow is not None and float(overflow) > 0:
        return
    for group in optimizer.param_groups:
        decay = group.get(_DECAY, 0.0)
        for parameter in group["params"] if decay else ():
            if parameter.grad is not None:
                state = optimizer.state[parameter]
                before = state.get(_DECAYING)
                state[_DECAYING] = (
                    parameter * decay if before is None else before.mul_(group[_LENT]).add_(parameter, alpha=decay)
                )
                parameter.add_(state[_DECAYING], alpha=-float(group["lr"]))


def return_momentum(optimizers: Sequence[Optimizer]) -> None:
    """Undo :func:`lend_momentum`. What was accumulated of the weight decay goes; but without a step between it is what was
    loaded before, and stays for the next attempt.
    """
    for optimizer in optimizers:
        if optimizer in _hooks:
            for handle in _hooks.pop(optimizer):
                handle.remove()
        if optimizer in _stepped:
            _stepped.remove(optimizer)
            for parameter, state in optimizer.state.items():  # anew: a state that was saved holds the old ones
                optimizer.state[parameter] = {name: value for name, value in state.items() if name != _DECAYING}
        give_back(optimizer.param_groups, _LOAN)
