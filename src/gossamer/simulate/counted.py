"""Counted: what one step of a model computes, by running it on ``meta`` and counting the arithmetic of its operations.

Counted are matrix products, convolutions and attention, by the formulas of ``torch.utils.flop_counter``. All else takes no
time, as its share of a step is in the utilisation at which devices are taken to work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from gossamer.engine.checks import named_parameters
from gossamer.simulate.profile import Compute


class Counting(TorchDispatchMode):
    """Inside, ``counted`` is called with the floating-point operations of every operation that has some."""

    def __init__(self, counted: Callable[[int], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counted = counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func._overloadpacket)
        if formula is not None:
            self._counted(formula(*args, **(kwargs or {}), out_val=result))
        return result


@dataclass
class Counted:
    """Floating-point operations of one step: of both passes, and how many there were when a gradient was ready (since backward
    began) and when a parameter was first used. ``saved``: bytes that the forward pass keeps for backward, without parameters.
    """

    forward: int = 0
    backward: int = 0
    ready: dict[str, int] = field(default_factory=dict)
    needed: dict[str, int] = field(default_factory=dict)
    saved: int = 0

    @property
    def total(self) -> int:
        """Of the whole step."""
        return self.forward + self.backward

    def compute(self, seconds: float, optimizer: float = 0.0) -> Compute:
        """The step as one whose passes take so many seconds, and the step of the optimizer ``optimizer`` more."""
        unit = seconds / max(1, self.total)
        return Compute(
            forward=self.forward * unit,
            backward=self.backward * unit,
            optimizer=optimizer,
            ready={name: count * unit for name, count in self.ready.items()},
            needed={name: count * unit for name, count in self.needed.items()},
        )


Loss = Callable[[Any], Tensor]
"""Of the model's outputs."""


def count_step(
    model: nn.Module, inputs: Sequence[Any], loss: Loss, named: Mapping[str, Any] = MappingProxyType({}), passes: int = 1
) -> Counted:
    """Count one forward and backward pass of ``model``, whose tensors are on ``meta`` as ``inputs`` are, and those that are
    ``named``. Where a step has several ``passes``, the others come before these.

    Parameters without a gradient are ready when backward ends.
    """
    found, done = Counted(), 0

    def count(operations: int) -> None:
        nonlocal done
        done += operations

    def note(moments: dict[str, int], name: str, *_: Any) -> None:
        moments[name] = done - (found.forward if moments is found.ready else 0)

    handles = _hook(model, partial(note, found.needed), partial(note, found.ready))
    try:
        with Counting(count):
            with _counting_saved(found, model):
                value = loss(model(*inputs, **named))
            found.forward = done
            value.backward()
            found.backward = done - found.forward
        found.forward += (passes - 1) * found.total
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad()
    return found


def _hook(model: nn.Module, needed: Callable[[str], None], ready: Callable[..., None]) -> list[Any]:
    """Call ``needed`` with the name of each parameter whose module begins, ``ready`` with that of each whose gradient came."""
    parameters = named_parameters(model)
    names = {id(parameter): name for name, parameter in parameters.items()}
    seen: set[str] = set()

    def begin(own: Sequence[str], *_: Any) -> None:
        for name in own:
            if name not in seen:
                seen.add(name)
                needed(name)

    handles: list[Any] = []
    for module in model.modules():
        own = [names[id(each)] for each in module.parameters(recurse=False) if id(each) in names and each.requires_grad]
        if own:
            handles.append(module.register_forward_pre_hook(partial(begin, own)))
    trainable = {name: each for name, each in parameters.items() if each.requires_grad}
    return handles + [each.register_post_accumulate_grad_hook(partial(ready, name)) for name, each in trainable.items()]


def _counting_saved(found: Counted, model: nn.Module) -> saved_tensors_hooks:
    """Inside, bytes of the tensors that autograd keeps are added up, once for each memory, without that of the model."""
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Any] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own and storage._cdata not in kept:
            kept[storage._cdata] = storage  # held, so that no other one gets its number
            found.saved += storage.nbytes()
        return tensor

    return saved_tensors_hooks(pack, lambda tensor: tensor)


def as_mean(outputs: Any) -> Tensor:
    """A scalar of outputs, where the loss does not matter: of a tensor, or of the first in a tuple or mapping."""
    if isinstance(outputs, Mapping):
        outputs = next(iter(outputs.values()))
    if isinstance(outputs, tuple | list):
        outputs = outputs[0]
    return torch.mean(outputs.float())
