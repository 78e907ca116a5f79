"""Profile: what the clocked runner must know about the network and about the model's computation."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import nn
from torch.nn import Parameter

from gossamer.errors import ConfigurationError
from gossamer.sync.checks import named_parameters


@dataclass(frozen=True, kw_only=True)
class Link:
    """Each rank's connection to the others: ``bandwidth`` in bits per second (each direction), ``latency`` in seconds."""

    bandwidth: float = math.inf
    latency: float = 0.0

    def __post_init__(self) -> None:
        if not self.bandwidth > 0:
            raise ConfigurationError(f"bandwidth must be a positive number of bits per second; got {self.bandwidth!r}")
        if not 0 <= self.latency < math.inf:
            raise ConfigurationError(f"latency must be a number of seconds; got {self.latency!r}")


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds that one step computes, and when in it each gradient is there.

    ``ready`` gives, by parameter name, seconds after the beginning of the backward pass; a gradient without an entry
    comes when the backward pass ends.
    """

    forward: float
    backward: float
    optimizer: float = 0.0
    ready: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "optimizer"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigurationError(f"{name} must be a number of seconds; got {getattr(self, name)!r}")
        for name, moment in self.ready.items():
            if not 0 <= moment <= self.backward * (1 + 1e-9):
                raise ConfigurationError(f"ready[{name!r}] is {moment!r}, not within the backward pass of {self.backward:g} s")

    @property
    def seconds(self) -> float:
        """The whole step, computation alone."""
        return self.forward + self.backward + self.optimizer

    def ready_at(self, names: Iterable[str]) -> float:
        """When the last of these gradients is there, in seconds after the beginning of the backward pass."""
        return max((self.ready.get(name, self.backward) for name in names), default=0.0)

    @classmethod
    def uniform(cls, model: nn.Module, *, forward: float, backward: float, optimizer: float = 0.0) -> "Compute":
        """Backward goes through the parameters in reverse, each taking time in proportion to its size."""
        backwards = list(reversed(_trainable(model).items()))
        total, done, ready = max(1, sum(p.numel() for _, p in backwards)), 0, {}
        for name, parameter in backwards:
            done += parameter.numel()
            ready[name] = backward * done / total
        return cls(forward=forward, backward=backward, optimizer=optimizer, ready=ready)

    @classmethod
    def layered(cls, model: nn.Module, layers: Mapping[str, tuple[float, float]], *, optimizer: float = 0.0) -> "Compute":
        """From measured (forward, backward) seconds by layer, in forward order.

        A layer's gradients are there when its backward is done. A parameter belongs to the layer with the longest
        name that its own begins with; ``""`` holds whatever is left.
        """
        done, ends = 0.0, {}
        for layer, (_, seconds) in reversed(list(layers.items())):
            done = ends[layer] = done + seconds
        ready = {name: ends[_layer_of(name, ends)] for name in _trainable(model)}
        return cls(forward=sum(f for f, _ in layers.values()), backward=done, optimizer=optimizer, ready=ready)


def _trainable(model: nn.Module) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in named_parameters(model).items() if parameter.requires_grad}


def _layer_of(name: str, layers: Iterable[str]) -> str:
    holding = [layer for layer in layers if layer == "" or name.startswith(f"{layer}.")]
    if not holding:
        raise ConfigurationError(f"parameter {name!r} belongs to none of the layers {', '.join(layers)}")
    return max(holding, key=len)
