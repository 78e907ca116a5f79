"""Checks: what is refused at the start."""

import sys
import weakref
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.engine.ties import across
from gossamer.errors import ConfigurationError
from gossamer.memory import is_stored

replicated: "weakref.WeakValueDictionary[int, Parameter]" = weakref.WeakValueDictionary()
left_alone: "weakref.WeakValueDictionary[int, Parameter]" = weakref.WeakValueDictionary()
"""Parameters that an open replica leaves to each rank: the same optimizer may hold them, and other replicas may have them."""

T = TypeVar("T", bound=Tensor)

IGNORED = "_ddp_params_and_buffers_to_ignore"
"""The attribute of a model in which DDP looks for the names of what it is to leave alone."""


def named_parameters(model: nn.Module) -> dict[str, Parameter]:
    """All parameters by name, without ignored ones, shared (tied) ones once, under the first name that is not ignored; names as
    in the uncompiled model."""
    return _once(model, model.named_parameters(remove_duplicate=False))


def named_buffers(model: nn.Module) -> dict[str, Tensor]:
    """The same of buffers."""
    return _once(model, model.named_buffers(remove_duplicate=False))


def _once(model: nn.Module, named: Iterable[tuple[str, T]]) -> dict[str, T]:
    left, found = getattr(model, IGNORED, ()), dict[int, tuple[str, T]]()
    for key, tensor in named:
        if (name := uncompiled(key)) not in left:
            found.setdefault(id(tensor), (name, tensor))
    return dict(found.values())


class Ignored:
    """What of a model is left to each rank, for as long as its replica is open: named where DDP looks for it."""

    def __init__(self, model: Any, ignore: Sequence[str | nn.Module]) -> None:
        """Name it. Raises ConfigurationError where the model has none of that."""
        self._model, self._before = model, list(getattr(model, IGNORED, ()))
        self._named = bool(ignore)
        if self._named:
            setattr(model, IGNORED, [*self._before, *names_of(model, ignore)])
        names = set(getattr(model, IGNORED, ()))
        named = model.named_parameters(remove_duplicate=False) if names and isinstance(model, nn.Module) else ()
        self._left = {id(p): p for key, p in named if uncompiled(key) in names}
        left_alone.update(self._left)

    def release(self) -> None:
        """The model names what it did before."""
        for each in self._left:
            left_alone.pop(each, None)
        self._left.clear()
        if self._named:
            setattr(self._model, IGNORED, self._before)
            if not self._before:
                delattr(self._model, IGNORED)
        self._named = False


def names_of(model: nn.Module, chosen: Sequence[str | nn.Module]) -> list[str]:
    """All names of the parameters and buffers that ``chosen`` names, or that belong to modules there."""
    if not isinstance(model, nn.Module):
        return []
    if isinstance(chosen, str):
        raise ConfigurationError(f"ignore takes a sequence of names and modules; got {chosen!r}: put it into a list")
    tensors = dict(chain(model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)))
    found: dict[str, None] = {}
    for each in chosen:
        prefixes = [each] if isinstance(each, str) else [n for n, m in model.named_modules(remove_duplicate=False) if m is each]
        here = [name for name in tensors for prefix in prefixes if _belongs(uncompiled(name), uncompiled(prefix))]
        if not here and (isinstance(each, str) or not prefixes):
            what = repr(each) if isinstance(each, str) else type(each).__name__
            raise ConfigurationError(f"ignore={what}: the model has no parameter, buffer or module of that name")
        found |= dict.fromkeys(here)
    return list(map(uncompiled, found))


def check_ignored(model: nn.Module) -> None:
    """Raise where gradients of a memory were exchanged under one name and left to each rank under another one."""
    left, named = getattr(model, IGNORED, ()), model.named_parameters(remove_duplicate=False)
    trainable: dict[str, Tensor] = {uncompiled(key): p for key, p in named if p.requires_grad and is_stored(p)}
    pair = across({name for name in trainable if name in left}, trainable)
    if pair is not None:
        raise ConfigurationError(
            f"ignore= leaves {pair[0]!r} to each rank, and not {pair[1]!r}, which shares its memory: name both or neither, or "
            "exchange weights"
        )


def _belongs(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(f"{prefix}." if prefix else "")


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
        _check_stored(f"parameter {name!r}", parameter)
        _check_writable("parameter", name, parameter)
    for name, buffer in named_buffers(model).items():
        if buffer.layout is not torch.strided:
            raise ConfigurationError(
                f"buffer {name!r} is {buffer.layout}, and only dense ones can be copied from rank 0: make it dense, or an "
                "attribute that is no buffer, which each rank keeps to itself"
            )
        _check_stored(f"buffer {name!r}", buffer)
        _check_writable("buffer", name, buffer)


def _check_writable(kind: str, name: str, tensor: Tensor) -> None:
    """Refuse views into which rank 0's values cannot be copied."""
    lazy = tensor.is_conj() or tensor.is_neg()
    if lazy or _lies_on_itself(tensor):
        why = "a view that conjugates or negates" if lazy else "expanded (elements share memory)"
        copy = "resolve_conj().resolve_neg()" if lazy else "clone()"
        raise ConfigurationError(
            f"{kind} {name!r} is {why}, so rank 0's values cannot be copied into it: register it as "
            f"{name.rpartition('.')[2]}.{copy}"
        )


def _lies_on_itself(tensor: Tensor) -> bool:
    """Whether several elements are the same memory, as after ``expand`` or ``unfold``."""
    sizes = list(zip(tensor.shape, tensor.stride(), strict=True))
    reach = 1 + sum((size - 1) * stride for size, stride in sizes)
    return bool(tensor.numel()) and (tensor.numel() > reach or any(stride == 0 and size > 1 for size, stride in sizes))


def _check_stored(called: str, tensor: Tensor) -> None:
    if not is_stored(tensor.detach()):
        raise ConfigurationError(
            f"{called} is of type {type(tensor.detach()).__name__}, which wraps other tensors and does not say which, so that "
            "rank 0's values cannot be copied: give that class __tensor_flatten__ and __tensor_unflatten__, or leave it to "
            "each rank (ignore=)"
        )


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
    if isinstance(parameter, nn.parameter.UninitializedParameter):
        raise ConfigurationError(f"parameter {name!r} is lazy and has no shape yet: run one forward pass before replicate()")
    if parameter.layout is not torch.strided:
        raise ConfigurationError(f"parameter {name!r} is {parameter.layout}; only dense parameters work")
    if id(parameter) in replicated:
        raise ConfigurationError(
            f"parameter {name!r} is replicated already: replicate() was called twice on this model (or on another that "
            "shares this parameter); call close() on the first replica before making another"
        )


def check_sparse(model: nn.Module) -> None:
    """Refuse gradients that will be sparse, where that is seen before they come."""
    names = {id(parameter): name for name, parameter in named_parameters(model).items()}
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            name = names.get(id(module.weight))
            if name is not None:
                raise ConfigurationError(
                    f"parameter {name!r} will have sparse gradients (sparse=True), which buckets have no place for: make it "
                    "sparse=False, take an algorithm that moves weights, or leave it to each rank (ignore=)"
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


def check_held(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    """Every trainable parameter belongs to exactly one optimizer, and no optimizer holds others than the model's."""
    parameters = named_parameters(model)
    if not any(p.requires_grad for p in parameters.values()):
        raise ConfigurationError(
            "the model has no trainable parameter, and so nothing to replicate (for such a stage of a pipeline, leave it out)"
        )
    holders: dict[int, int] = {}
    for optimizer in optimizers:
        for parameter in held_by(optimizer):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    missing = [name for name, p in parameters.items() if p.requires_grad and id(p) not in holders]
    if missing:
        raise ConfigurationError(
            f"the optimizer does not hold {some(missing)}: it was made for another model, or before this one was changed"
            " (freeze what is not to be trained: requires_grad_(False))"
        )
    twice = [name for name, p in parameters.items() if holders.get(id(p), 0) > 1]
    if twice:
        raise ConfigurationError(f"more than one optimizer holds {some(twice)}")
    foreign = set(holders) - set(map(id, model.parameters())) - set(replicated) - set(left_alone)
    if foreign:
        raise ConfigurationError(
            f"the optimizer holds {len(foreign)} parameter(s) that the model does not have: they would not be replicated "
            "(where another replica is to have them, make that one first)"
        )


def held_by(optimizer: Optimizer) -> list[Parameter]:
    """The parameters of an optimizer, in its order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def some(names: Sequence[str]) -> str:
    """A few parameters, by name."""
    shown = ", ".join(map(repr, names[:3]))
    return f"parameter {shown}" if len(names) == 1 else f"{len(names)} parameters ({shown}{', …' if len(names) > 3 else ''})"


def they_are(names: Sequence[str], past: bool = False) -> str:
    """These parameters, and the verb: "parameter 'weight' is"."""
    one = len(names) == 1
    return f"{some(names)} {('was' if one else 'were') if past else ('is' if one else 'are')}"


def release(parameters: Iterable[Parameter]) -> None:
    """They are replicated no more, and may be again."""
    for parameter in parameters:
        replicated.pop(id(parameter), None)
