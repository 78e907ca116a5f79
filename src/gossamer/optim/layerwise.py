"""Layerwise optimizer: what LARS and LAMB share, a step size of its own for every tensor."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError, UsageError


class Layerwise(Optimizer):
    """Calls :meth:`update` once per parameter group, device and precision.

    The group option ``adapt`` says which tensors get a step size of their own, and weight decay: those with two or
    more dimensions (None, the default: the field leaves out biases and the scales of normalisation), all (True) or
    none (False). Parameters of 16 bits are computed in float32, and so is what is remembered of them.
    """

    @abstractmethod
    def update(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor], adapted: list[bool]) -> None:
        """Change ``parameters`` in place. All lie on one device and have one dtype (float32 or float64), as the gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; ``closure`` recomputes the loss, which is returned."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameters in _alike(group["params"]):
                self._step(group, parameters)
        return loss

    def _step(self, group: Mapping[str, Any], parameters: list[Tensor]) -> None:
        self._current = parameters
        exact = [_exact(parameter) for parameter in parameters]
        adapted = [group["adapt"] is True or (group["adapt"] is None and p.dim() > 1) for p in parameters]
        self.update(group, exact, [_gradient(p).to(e.dtype) for p, e in zip(parameters, exact, strict=True)], adapted)
        rounded = [(p, e) for p, e in zip(parameters, exact, strict=True) if p is not e]
        if rounded:
            torch._foreach_copy_([p for p, _ in rounded], [e for _, e in rounded])

    def remembered(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the state holds under ``name`` for the parameters of this update; zeros at first."""
        for parameter, each in zip(self._current, like, strict=True):
            if name not in self.state[parameter]:
                self.state[parameter][name] = torch.zeros_like(each)
        return [self.state[parameter][name] for parameter in self._current]

    def count(self) -> list[int]:
        """How many updates each parameter of this update has had, this one included."""
        for parameter in self._current:
            self.state[parameter]["step"] = self.state[parameter].get("step", 0) + 1
        return [self.state[parameter]["step"] for parameter in self._current]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what ``state_dict()`` returned. torch casts state to the parameter's dtype; ours stays in float32."""
        super().load_state_dict(state_dict)
        saved = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        own = chain.from_iterable(group["params"] for group in self.param_groups)
        for key, parameter in zip(saved, own, strict=True):
            for name, value in state_dict["state"].get(key, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.to(parameter.device, copy=True)


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's ``closure`` computes, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def trust_ratios(
    weights: Sequence[Tensor], updates: Sequence[Tensor], adapted: Sequence[bool], ratio: Callable[[Tensor, Tensor], Tensor]
) -> list[Tensor]:
    """One factor per tensor: ``ratio(‖w‖, ‖u‖)``, and 1 where a norm is zero or the tensor is not adapted."""
    mine = torch.stack(torch._foreach_norm(list(weights)))
    theirs = torch.stack(torch._foreach_norm(list(updates)))
    chosen = (mine > 0) & (theirs > 0)
    if not all(adapted):
        chosen &= torch.tensor(adapted).to(mine.device, non_blocking=True)
    return list(torch.where(chosen, ratio(mine, theirs), torch.ones_like(mine)).unbind())


def pick(tensors: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    """The chosen ones."""
    return [tensor for tensor, yes in zip(tensors, chosen, strict=True) if yes]


def check_number(name: str, value: Any, low: float = 0.0, below: float = float("inf")) -> None:
    """Raise :class:`ConfigurationError` unless ``low ≤ value < below``."""
    if not low <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise ConfigurationError(f"{name} must be at least {low:g}{limit}; got {value!r}")


def check_adapt(value: Any) -> None:
    """Raise :class:`ConfigurationError` unless ``value`` is None, True or False."""
    if value is not None and not isinstance(value, bool):
        raise ConfigurationError(f"adapt must be None (tensors with two or more dimensions), True or False; got {value!r}")


def _alike(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Parameters that have a gradient, by device and by the precision that they are computed in."""
    found: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            found.setdefault((parameter.device, parameter.dtype == torch.float64), []).append(parameter)
    yield from found.values()


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    if parameter.grad.is_sparse:
        raise UsageError("a gradient is sparse, but LARS and LAMB need its whole norm: use nn.Embedding(…, sparse=False)")
    return parameter.grad
