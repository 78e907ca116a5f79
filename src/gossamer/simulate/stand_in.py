"""Stand-in: a module with the names and shapes of a model that, instead of computing, lets the time of a profile pass.

It is trained as the model would be: its forward pass calls the modules that hold parameters when these are needed, and its
backward pass produces the gradients when they are ready, on ``meta`` tensors. So whatever hooks a replica has on the
model's modules and parameters are called as in training.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.engine.checks import named_parameters
from gossamer.hooks import OwnHook, in_nested_step
from gossamer.simulate.profile import Compute

PassTime = Callable[[float], None]
"""Called with so many seconds that are computed."""


class Twin(nn.Module):
    """Stands for a module of any kind: holds what it holds, and computes nothing."""

    def forward(self) -> Any:
        return None


def stand_in(model: nn.Module, compute: Compute, pass_time: PassTime, without: Collection[str] = ()) -> Twin:
    """A twin of ``model`` on ``meta``, whose call returns the loss of a step that computes as ``compute`` says.

    ``without``: names of buffers that it does not have.
    """
    twin = _twin(model, "", frozenset(without), {})
    uses = sorted(_uses(twin, compute), key=lambda use: use[0])
    twin.forward = partial(_forward, uses, cache(partial(_loss, twin, compute, pass_time)), compute, pass_time)  # type: ignore[method-assign]
    return twin


def _twin(module: nn.Module, path: str, without: frozenset[str], known: dict[int, Any]) -> Twin:
    """``known``: what was made already, by the id of what it stands for, as modules and tensors may be shared."""
    twin = known[id(module)] = Twin()
    for name, parameter in module._parameters.items():
        if parameter is not None:
            made = known.setdefault(id(parameter), Parameter(_blank(parameter), parameter.requires_grad))
            twin.register_parameter(name, made)
    for name, buffer in module._buffers.items():
        if buffer is not None and f"{path}{name}" not in without:
            twin.register_buffer(name, known.setdefault(id(buffer), _blank(buffer)))
    for name, child in module._modules.items():
        if child is not None:
            twin.add_module(name, known.get(id(child)) or _twin(child, f"{path}{name}.", without, known))
    return twin


def _blank(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="meta", requires_grad=False)


def _forward(
    uses: Sequence[tuple[float, nn.Module]], loss: Callable[[], Tensor], compute: Compute, pass_time: PassTime
) -> Tensor:
    now = 0.0
    for moment, module in uses:
        pass_time(moment - now)
        now = moment
        module()
    pass_time(compute.forward - now)
    return loss().clone()  # the graph is made once, as nothing in it is freed; each step has an output of its own


def _uses(twin: Twin, compute: Compute) -> Iterator[tuple[float, nn.Module]]:
    """When each module that holds parameters is called; the whole model is called already."""
    for path, module in twin.named_modules():
        names = [f"{path}.{name}" for name, parameter in module._parameters.items() if parameter is not None]
        if names and module is not twin:
            yield compute.needed_at(names), module


class _Computed(torch.autograd.Function):
    """Passes its input on. Its backward lets time pass, and then gives ``parameter`` a gradient."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, parameter: Tensor | None, wait: Callable[[], None]) -> Tensor:
        ctx.parameter, ctx.wait = parameter, wait
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.wait()
        return gradients[0], None if ctx.parameter is None else torch.empty_like(ctx.parameter, requires_grad=False), None


def _loss(twin: Twin, compute: Compute, pass_time: PassTime) -> Tensor:
    """One number on ``meta``, whose backward pass takes the profile's time and produces its gradients in its order."""
    trainable = [(name, p) for name, p in reversed(named_parameters(twin).items()) if p.requires_grad]
    moments = [(compute.ready_at([name]), parameter) for name, parameter in trainable]
    spans: list[tuple[Parameter | None, float]] = []
    done = 0.0
    for moment, parameter in sorted(moments, key=lambda each: each[0]):
        spans.append((parameter, moment - done))
        done = moment
    loss = torch.zeros((), device="meta", requires_grad=True)
    for produced, seconds in reversed([*spans, (None, compute.backward - done)]):
        loss = _Computed.apply(loss, produced, partial(pass_time, seconds))  # type: ignore[no-untyped-call]
    return loss


def leave_to_torch(optimizer: Optimizer) -> None:
    """Let the optimizer step operation by operation: its kernels for devices (``fused``, ``capturable``) refuse ``meta``."""
    for group in optimizer.param_groups:
        group.update({name: False for name in ("fused", "capturable") if group.get(name)})


def take_time(optimizer: Optimizer, seconds: float, pass_time: PassTime, over: Callable[[], None]) -> None:
    """Let a step of the optimizer take so long: of parts of it (by which parameters have a gradient) a share.

    ``over`` is called when a step ends.

    To be called before :func:`gossamer.replicate`, so that what a replica does after a step comes after that.
    """
    whole = sum(p.numel() for group in optimizer.param_groups for p in group["params"])

    def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        over()
        if not in_nested_step(optimizer):
            stepped = (p.numel() for group in optimizer.param_groups for p in group["params"] if p.grad is not None)
            pass_time(seconds * sum(stepped) / max(1, whole))

    optimizer.register_step_post_hook(OwnHook(after_step))
