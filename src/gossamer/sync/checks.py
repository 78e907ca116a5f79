"""Checks: what is refused at the start, and what is watched afterwards."""

import sys
import weakref
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError, UsageError
from gossamer.optim.communicating import Communicating
from gossamer.sync.loop import Subscriber

_replicated: "weakref.WeakValueDictionary[int, Parameter]" = weakref.WeakValueDictionary()


def named_parameters(model: nn.Module) -> dict[str, Parameter]:
    """All parameters by name, shared (tied) ones once; names as in the uncompiled model."""
    return {uncompiled(name): parameter for name, parameter in model.named_parameters()}


def uncompiled(name: str) -> str:
    """The name that a parameter or buffer has in the model as it was before ``torch.compile``."""
    return name.replace("_orig_mod.", "")


def check_model(model: Any) -> None:
    """Refuse what cannot be replicated in place, with the reason."""
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"replicate() takes a torch.nn.Module; got {type(model).__name__}")
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigurationError(
                f"module {path!r} is scripted (torch.jit) and takes no hooks: give the model as it was before torch.jit.script"
            )
        _check_wrapper(module)
    for name, parameter in named_parameters(model).items():
        _check_parameter(name, parameter)
    for name, buffer in model.named_buffers():
        if buffer.layout is not torch.strided:
            raise ConfigurationError(
                f"buffer {name!r} is {buffer.layout}, and only dense ones can be copied from rank 0: make it dense, or an "
                "attribute that is no buffer, which each rank keeps to itself"
            )
        if _lies_on_itself(buffer):
            raise ConfigurationError(
                f"buffer {name!r} is expanded (elements share memory), so rank 0's values cannot be copied into it: register "
                f"it as {name.rpartition('.')[2]}.clone()"
            )


def _lies_on_itself(tensor: Tensor) -> bool:
    """Whether several elements are the same memory, as after ``expand``."""
    return any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True))


def _check_wrapper(module: nn.Module) -> None:
    if isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ConfigurationError(
            f"the model is already wrapped in {type(module).__name__}, which communicates gradients itself: "
            "pass the bare model (wrapped.module), and from then on call that one"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise ConfigurationError(
            "the model is wrapped in FSDP1 (FullyShardedDataParallel), whose flat parameters cannot be replicated"
        )


def _check_parameter(name: str, parameter: Parameter) -> None:
    if type(parameter.data).__name__ == "DTensor":
        raise ConfigurationError(f"parameter {name!r} is a DTensor; sharded parameters are not supported yet")
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigurationError(f"parameter {name!r} is lazy and has no shape yet: run one forward pass before replicate()")
    if parameter.is_complex() or parameter.layout is not torch.strided:
        raise ConfigurationError(
            f"parameter {name!r} is {parameter.dtype}, {parameter.layout}; only dense real parameters work"
        )
    if id(parameter) in _replicated:
        raise ConfigurationError(
            f"parameter {name!r} is replicated already: replicate() was called twice on this model (or on another that "
            "shares this parameter); call close() on the first replica before making another"
        )


def check_optimizers(optimizers: Any) -> tuple[Optimizer, ...]:
    """One optimizer, or several, as a tuple."""
    listed = (optimizers,) if isinstance(optimizers, Optimizer) else optimizers
    if not isinstance(listed, Sequence) or not listed or not all(isinstance(o, Optimizer) for o in listed):
        raise ConfigurationError(
            f"replicate() takes a torch.optim.Optimizer or a sequence of them; got {type(optimizers).__name__}"
        )
    for optimizer in listed:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # a subclass that has not called its base's __init__
            raise ConfigurationError(
                f"{type(optimizer).__name__} wraps an optimizer, and its own steps cannot be watched: give the one inside it "
                "(as wrapper.optimizer)"
            )
        if isinstance(getattr(optimizer, "inner", optimizer), torch.optim.LBFGS):
            raise ConfigurationError(
                "LBFGS cannot be replicated: it decides by each rank's own loss where to evaluate it next, so that ranks would "
                "take different numbers of backward passes; use another optimizer"
            )
    return tuple(listed)


def check_held(parameters: Mapping[str, Parameter], optimizers: Sequence[Optimizer]) -> None:
    """Every trainable parameter belongs to exactly one optimizer, and no optimizer holds others."""
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter in held_by(optimizer):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    missing = [name for name, p in parameters.items() if p.requires_grad and id(p) not in holders]
    if missing:
        raise ConfigurationError(
            f"the optimizer does not hold {_some(missing)}: it was made for another model, or before this one was changed"
            " (freeze what is not to be trained: requires_grad_(False))"
        )
    twice = [name for name, p in parameters.items() if holders.get(id(p), 0) > 1]
    if twice:
        raise ConfigurationError(f"more than one optimizer holds {_some(twice)}")
    foreign = set(holders) - {id(p) for p in parameters.values()}
    if foreign:
        raise ConfigurationError(
            f"the optimizer holds {len(foreign)} parameter(s) that the model does not have: they would not be replicated"
        )
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigurationError("the model has no trainable parameter")


def held_by(optimizer: Optimizer) -> list[Parameter]:
    """The parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _ids(places: Sequence[dict[str, Any]]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, places))))


def _attributes(name: str, objects: Sequence[Any]) -> list[Any]:
    return list(map(attrgetter(name), objects))


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return f"parameter {shown}" if len(names) == 1 else f"{len(names)} parameters ({shown}{', …' if len(names) > 3 else ''})"


class Watch(Subscriber):
    """Notices what would silently not be replicated: parameters added, replaced or unfrozen afterwards.

    The check runs at every optimizer step, so it only compares objects by identity, all at once.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter]) -> None:
        modules = list(model.modules())
        self._places: list[dict[str, Any]] = [place for module in modules for place in (module._parameters, module._modules)]
        self._before, self._ids = [dict(place) for place in self._places], _ids(self._places)
        self._groups = [(optimizer, [id(p) for p in held_by(optimizer)]) for optimizer in optimizers]
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        communicating = any(isinstance(optimizer, Communicating) for optimizer in optimizers)
        self._not_to_freeze = {name: p for name, p in parameters.items() if communicating and p.requires_grad}
        self._names, self._own = list(parameters), list(parameters.values())
        self._dtypes, self._devices = _attributes("dtype", self._own), _attributes("device", self._own)
        for parameter in self._own:
            _replicated[id(parameter)] = parameter

    def before_step(self, index: int, closure: bool) -> None:
        """Raise :class:`UsageError` if the model or an optimizer is not what was replicated."""
        if _ids(self._places) != self._ids:
            pairs = zip(self._places, self._before, strict=True)
            changed = [key for now, before in pairs for key in {**now, **before} if now.get(key) is not before.get(key)]
            if changed:  # and not only put in another order
                raise UsageError(f"{_some(changed)} was added, replaced or removed after replicate(); {_again}")
        for optimizer, before_ids in self._groups:
            if [id(p) for p in held_by(optimizer)] != before_ids:
                raise UsageError(f"the parameters of {type(optimizer).__name__} changed after replicate(); {_again}")
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen:
            raise UsageError(f"{_some(unfrozen)} was unfrozen after replicate(); {_again}")
        frozen = [name for name, parameter in self._not_to_freeze.items() if not parameter.requires_grad]
        if frozen:
            raise UsageError(f"{_some(frozen)} was frozen, with an optimizer that communicates by itself; {_again}")
        if _attributes("dtype", self._own) != self._dtypes or _attributes("device", self._own) != self._devices:
            before = zip(self._names, self._own, self._dtypes, self._devices, strict=True)
            name, p, dtype, device = next(row for row in before if (row[1].dtype, row[1].device) != row[2:])
            raise UsageError(f"parameter {name!r} moved from {dtype} on {device} to {p.dtype} on {p.device}; {_again}")

    def release(self) -> None:
        """The replica is closed; its parameters may be replicated again."""
        release(self._own)


def release(parameters: Iterable[Parameter]) -> None:
    """They are replicated no more, and may be again."""
    for parameter in parameters:
        _replicated.pop(id(parameter), None)


_again = "call replica.close() and gossamer.replicate() again after changing the model"
