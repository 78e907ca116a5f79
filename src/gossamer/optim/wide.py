"""Wide optimizer: what our optimizers share that update many tensors at a time, in at least float32."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import compress, repeat
from numbers import Real
from operator import attrgetter, is_, is_not
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError, UsageError
from gossamer.optim.loading import loading, put_back
from gossamer.optim.parts import own


class Wide(Optimizer):
    """Calls :meth:`change` once per parameter group, device and precision.

    Parameters of 16 bits are computed in float32, and so is what is remembered of them.
    """

    @abstractmethod
    def change(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        """Change ``parameters`` in place. All lie on one device and have one dtype (float32 or float64), as the gradients."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update; ``closure`` recomputes the loss, which is returned."""
        loss = evaluated(closure)
        for group in self.param_groups:
            for parameters, given in _alike(group["params"]):
                self._step(group, parameters, given)
        return loss

    def _step(self, group: Mapping[str, Any], parameters: list[Tensor], given: list[Tensor]) -> None:
        """Change ``parameters``, of which ``given`` are the gradients as they are."""
        if any(map(_is_sparse, given)):
            raise _needs_all(self)
        exact = parameters if _kinds(parameters) <= _WIDE else [_exact(parameter) for parameter in parameters]
        gradients, kinds = given, _kinds(given)
        if len(kinds) > 1 or kinds != _kinds(exact):
            gradients = [g if g.dtype == e.dtype else g.to(e.dtype) for g, e in zip(given, exact, strict=True)]
        self._states = [self.state[parameter] for parameter in parameters]
        try:
            self.change(group, exact, gradients)
        finally:
            self._states = []
        if exact is not parameters:
            rounded = [(p, e) for p, e in zip(parameters, exact, strict=True) if p is not e]
            torch._foreach_copy_(own(p for p, _ in rounded), own(e for _, e in rounded))

    def remembered(self, name: str, like: Sequence[Tensor]) -> list[Tensor]:
        """The tensors that the state holds under ``name`` for the parameters of this update; zeros at first.

        They follow a model that was moved to another device or precision.
        """
        found = [state.get(name) for state in self._states]
        if any(map(is_, found, repeat(None))) or not _lie_alike(found, like):
            for state, each in zip(self._states, like, strict=True):
                kept = state.get(name)
                state[name] = torch.zeros_like(each) if kept is None else kept.to(each)
            found = [state[name] for state in self._states]
        return found

    def count(self) -> list[int]:
        """How many updates each parameter of this update has had, this one included."""
        for state in self._states:
            state["step"] = state.get("step", 0) + 1
        return [state["step"] for state in self._states]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Options that a loaded state does not know (AdamW's has none of ours) are as the optimizer was made with."""
        super().__setstate__(state)
        fill_in(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Put back what ``state_dict()`` returned. torch casts state to the parameter's dtype; ours stays in float32."""
        with loading(self, lambda state: put_back(self, state)):
            super().load_state_dict(state_dict)


def fill_in(optimizer: Optimizer) -> None:
    """Give every group the options that it lacks."""
    for group in optimizer.param_groups:
        for name, value in optimizer.defaults.items():
            group.setdefault(name, value)


def check_dense(optimizer: Optimizer, parameter: Tensor) -> None:
    """Raise :class:`UsageError` if the parameter has a sparse gradient."""
    if parameter.grad is not None and parameter.grad.is_sparse:
        raise _needs_all(optimizer)


_is_sparse, _is_cpu, _grad = attrgetter("is_sparse"), attrgetter("is_cpu"), attrgetter("grad")
_dtype, _device = attrgetter("dtype"), attrgetter("device")

_WIDE = {torch.float32, torch.float64}


def _needs_all(optimizer: Optimizer) -> UsageError:
    return UsageError(
        f"a gradient is sparse, but {type(optimizer).__name__} needs all of it: use nn.Embedding(…, sparse=False)"
    )


def evaluated(closure: Callable[[], Any] | None) -> Any:
    """The loss that a step's ``closure`` computes, with gradients; None without one."""
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def check_number(name: str, value: Any, low: float = 0.0, below: float = float("inf")) -> None:
    """Raise :class:`ConfigurationError` unless it is a number and ``low ≤ value < below``."""
    is_number = isinstance(value, Real | Tensor) and not isinstance(value, bool)
    if not is_number or not low <= value < below:
        limit = "" if below == float("inf") else f" and below {below:g}"
        raise ConfigurationError(f"{name} must be at least {low:g}{limit}; got {value!r}")


# What follows runs in every step, amid kernels that evict it from every cache: with no line of Python per tensor where all lie
# on the host and are alike, as they mostly do.


def _alike(parameters: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Parameters that have a gradient, and their gradients, by device and by the precision that they are computed in."""
    found: dict[tuple[torch.device, bool], tuple[list[Tensor], list[Tensor]]] = {}
    given = list(map(_grad, parameters))
    with_gradient = list(map(is_not, given, repeat(None)))
    held, gradients = list(compress(parameters, with_gradient)), list(compress(given, with_gradient))
    if all(map(_is_cpu, held)) and (len(_kinds(held)) == 1 or torch.float64 not in _kinds(held)):
        if held:
            yield held, gradients
        return
    for parameter, gradient in zip(held, gradients, strict=True):
        kind = parameter.device, parameter.dtype == torch.float64
        if kind not in found:
            found[kind] = [], []
        found[kind][0].append(parameter)
        found[kind][1].append(gradient)
    yield from found.values()


def _kinds(tensors: Sequence[Tensor]) -> set[torch.dtype]:
    return set(map(_dtype, tensors))


def _lie_alike(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether each has the type of its counterpart and lies where that does."""
    if list(map(_dtype, some)) != list(map(_dtype, others)):
        return False
    on_host = all(map(_is_cpu, some)) and all(map(_is_cpu, others))
    return on_host or list(map(_device, some)) == list(map(_device, others))


def _exact(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype in _WIDE else tensor.float()
