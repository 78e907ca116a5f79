"""Other exchanges: wrappers that communicate the gradients of a replicated model as well, noticed when it is called in them.

A framework may wrap a model after ``replicate()``, or go on calling the wrapper whose module was replicated. Gradients would be
averaged twice, without a word.
"""

import sys
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from gossamer.comm.runner import Runner, alarming
from gossamer.errors import UsageError
from gossamer.hooks import InsideDDP

_DDP = nn.parallel.DistributedDataParallel

_OTHERS = {
    "FullyShardedDataParallel": "FSDP1 shards the parameters that are replicated",
    "ShardedDataParallel": "it reduces gradients in its own hooks",
    "DeepSpeedEngine": "the engine reduces gradients in its own backward()",
}
"""Wrappers that torch does not know of while they compute, by the name of their class, and what they do."""


class OtherExchanges:
    """Refuses a training forward pass inside of a wrapper that communicates the same parameters.

    torch keeps the DDP module whose forward pass runs (``_active_ddp_module``, also for torch's composable
    ``replicate``); it is read before and after every forward pass. Other wrappers are searched for among the callers of the
    first one.
    """

    def __init__(self, runner: Runner, parameters: Mapping[str, Parameter], gradients: bool) -> None:
        """``gradients``: the algorithm exchanges gradients. One of weights may be combined with DDP among other ranks."""
        self._runner, self._gradients = runner, gradients
        self._names = {id(parameter): name for name, parameter in parameters.items()}

    def hook(self, model: nn.Module) -> list[Any]:
        """Look at every forward pass of ``model``; returns the handles."""
        return [model.register_forward_pre_hook(InsideDDP(self._look)), model.register_forward_hook(InsideDDP(self._look))]

    def _look(self, module: nn.Module, *passed: Any) -> bool:
        """Whether the callers were searched."""
        if _DDP._active_ddp_module is not None:
            _outside_of_graphs(self._check_ddp, _DDP._active_ddp_module)
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return False
        self._search(module)
        return True

    def _check_ddp(self, wrapper: Any) -> None:
        if not torch.is_grad_enabled() or not wrapper.require_backward_grad_sync:
            return
        shared = [self._names[id(p)] for p in wrapper._module_parameters if p.requires_grad and id(p) in self._names]
        if shared and (self._gradients or self._runner.meets(wrapper.process_group)):
            self._refuse(
                f"DistributedDataParallel averages the gradient of {shared[0]!r} as well, in its own exchange",
                "call the model that replicate() was given and not the wrapper around it; where a framework makes the wrapper, "
                "take gossamer.DistributedDataParallel(model, optimizer, algorithm) in its place, or gossamer.integrations",
            )

    def _search(self, module: nn.Module) -> None:
        for wrapper in _callers(sys._getframe()):
            kind = next((name for cls in type(wrapper).__mro__ if (name := cls.__name__) in _OTHERS), "")
            if kind and any(each is module for each in wrapper.modules()):
                self._refuse(
                    f"the model is called by a {kind}: {_OTHERS[kind]}",
                    "give replicate() the bare model and the plain optimizer, and train that; or leave out replicate()",
                )

    def _refuse(self, what: str, instead: str) -> None:
        with alarming(self._runner):
            raise UsageError(
                f"rank {self._runner.rank}: {what}, and gossamer.replicate() exchanges the same parameters: one of the two has "
                f"to go: {instead}"
            )


def _outside_of_graphs(check: Any, wrapper: Any) -> None:
    check(wrapper)


# What torch.compiler.disable sets, without the second that importing the compiler takes.
_outside_of_graphs._torchdynamo_disable = True  # type: ignore[attr-defined]


def _callers(frame: FrameType | None) -> Iterator[nn.Module]:
    """The modules whose methods are being called, from the innermost on."""
    while frame is not None:
        found = frame.f_locals.get("self") if "self" in frame.f_code.co_varnames else None
        if isinstance(found, nn.Module):
            yield found
        frame = frame.f_back
