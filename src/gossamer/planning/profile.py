"""Profile: what a training step computes, and when each gradient is there, by watching steps of a replica."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.comm.runner import Runner
from gossamer.engine.agreement import values_of_all
from gossamer.errors import UsageError
from gossamer.hooks import OwnHook
from gossamer.planning.links import wait_for
from gossamer.simulate.profile import Compute

STEPS = 3
"""Steps that are watched."""

_PASSES = ("forward", "backward", "optimizer")


class StepProfile:
    """Notes the moments of steps. What passes between a step and the next forward pass (data) counts as computed in that.

    On a device, whose kernels run behind the host, whole passes are timed, and gradients come in proportion to their sizes.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Parameter], optimizer: Optimizer, now: Callable[[], float]
    ) -> None:
        """``now``: the clock of the replica's runner."""
        self._model, self._parameters, self._optimizer, self._now = model, dict(parameters), optimizer, now
        self._device = next(iter(parameters.values())).device
        self._handles: list[Any] = []
        self._marks: dict[str, float] = {}
        self._ready: dict[str, float] = {}
        self._needed: dict[str, float] = {}
        self._passes: list[dict[str, float]] = []
        self._readies: list[dict[str, float]] = []
        self._needs: list[dict[str, float]] = []
        self._whole: list[float] = []

    def hook(self) -> None:
        """Begin to watch."""
        self._handles.append(self._model.register_forward_pre_hook(OwnHook(self._forward_begins)))
        self._handles.append(self._model.register_forward_hook(OwnHook(self._forward_ends)))
        self._handles.append(self._optimizer.register_step_pre_hook(OwnHook(self._step_begins)))
        if self._device.type != "cpu" and self._device.type != "meta":
            return
        for name, parameter in self._parameters.items():
            self._handles.append(parameter.register_hook(partial(self._note, name)))
        for module, names in self._modules():
            self._handles.append(module.register_forward_pre_hook(OwnHook(partial(self._needs_now, names))))

    def release(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _modules(self) -> Iterator[tuple[nn.Module, list[str]]]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        for module in self._model.modules():
            own = [names[id(p)] for p in module.parameters(recurse=False) if id(p) in names]
            if own and module is not self._model:
                yield module, own

    def _moment(self) -> float:
        wait_for(self._device)
        return self._now()

    def _forward_begins(self, *args: Any) -> None:
        if torch.is_grad_enabled() and "forward" not in self._marks:
            self._marks["forward"] = self._moment()

    def _forward_ends(self, *args: Any) -> None:
        if torch.is_grad_enabled() and "forward" in self._marks:
            self._marks["backward"] = self._moment()

    def _needs_now(self, names: Sequence[str], *args: Any) -> None:
        for name in names:
            self._needed.setdefault(name, self._now())

    def _note(self, name: str, gradient: Tensor) -> None:
        self._ready[name] = self._now()

    def _step_begins(self, *args: Any) -> None:
        self._marks["step"] = self._moment()

    def end_step(self) -> None:
        """A step is over."""
        marks, end = self._marks, self._moment()
        if {"last", "forward", "backward", "step"} <= marks.keys():
            self._keep(marks, end)
        self._marks, self._ready, self._needed = {"last": end}, {}, {}

    def _keep(self, marks: Mapping[str, float], end: float) -> None:
        last, back = marks["last"], marks["backward"]
        done = max(self._ready.values(), default=marks["step"])
        self._passes.append({"forward": back - last, "backward": max(0.0, done - back), "optimizer": end - marks["step"]})
        self._whole.append(end - last)
        self._readies.append({name: max(0.0, moment - back) for name, moment in self._ready.items()})
        self._needs.append({name: min(max(0.0, moment - last), back - last) for name, moment in self._needed.items()})

    def compute(self, runner: Runner, learning: int) -> Compute:
        """The medians of what was seen but for ``learning`` steps, of the slowest rank; moments as rank 0 has them. Collective.

        Raises:
            UsageError: on every rank, if on some rank the model was not called itself, so that no forward pass was seen.
        """
        for seen in (self._passes, self._readies, self._needs, self._whole):
            del seen[: learning - 1]  # of the first step the beginning was not seen
        mine = {name: median(each[name] for each in self._passes) for name in _PASSES if self._passes}
        everyone = values_of_all(runner, mine)
        unseen = [rank for rank, each in enumerate(everyone) if not each]
        if unseen:
            raise UsageError(
                f"rank {unseen[0]}: no forward pass of the model was seen in the first steps, so its computation could not be "
                "timed: call the model that replicate() was given, or give replicate() an algorithm"
            )
        slowest = {name: max(each[name] for each in everyone) for name in mine}
        ready = _stretched(self._readies, mine["backward"], slowest["backward"])
        needed = _stretched(self._needs, mine["forward"], slowest["forward"])
        if not ready:
            return Compute.uniform(self._model, **slowest)
        return Compute(**slowest, ready=ready, needed=needed)

    def step_seconds(self, runner: Runner) -> float:
        """The median of whole steps, with what they exchanged, of the slowest rank; after :meth:`compute`. Collective."""
        return float(max(values_of_all(runner, median(self._whole))))


def _stretched(seen: Sequence[Mapping[str, float]], own: float, slowest: float) -> dict[str, float]:
    """The median moment of each name that is in all, as part of a pass that takes as long as the slowest rank's."""
    names = set(seen[0]).intersection(*seen[1:]) if seen else set()
    factor = slowest / own if own > 0 else 1.0
    return {name: min(slowest, factor * median(each[name] for each in seen)) for name in sorted(names)}
