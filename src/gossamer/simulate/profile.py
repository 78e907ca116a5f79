"""Profile: what the clocked runner must know about the network and about the model's computation."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from numbers import Real
from typing import TypeGuard

from torch import nn
from torch.nn import Parameter

from gossamer.comm.operations import Traffic
from gossamer.engine.checks import named_parameters
from gossamer.engine.usage import USAGE
from gossamer.errors import ConfigurationError
from gossamer.simulate.forms import FORMS, Form


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What software makes of a link.

    ``efficiency``: the share of the rate that payload has, after headers and acknowledgements. ``ceiling``: bits per second
    that all transfers together reach at most, however fast the link (NCCL over TCP: 18 to 20 Gbit/s at 100 Gbit/s).
    ``window``: bytes that one transfer may have on the way, so that it has at most one window per round trip.
    ``all_reduce``: the forms that it has, of which the one that ends first is taken; gossamer's own runner has a ring.
    """

    efficiency: float = 1.0
    ceiling: float = math.inf
    window: float = math.inf
    all_reduce: tuple[Form, ...] = ("ring",)

    def __post_init__(self) -> None:
        if not (_is_number(self.efficiency) and 0 < self.efficiency <= 1):
            raise ConfigurationError(f"efficiency must be a share of the rate, above 0 and up to 1; got {self.efficiency!r}")
        for name, unit in (("ceiling", "bits per second"), ("window", "bytes")):
            if not (_is_number(getattr(self, name)) and getattr(self, name) > 0):
                raise ConfigurationError(f"{name} must be a positive number of {unit}; got {getattr(self, name)!r}")
        forms = self.all_reduce
        if not (isinstance(forms, tuple) and forms and all(form in tuple(FORMS) for form in forms)):
            raise ConfigurationError(f"all_reduce must be a tuple of some of {', '.join(FORMS)}; got {forms!r}")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Each rank's connection to the others: ``bandwidth`` in bits per second (each direction), ``latency`` in seconds (one
    way), and the ``transport`` that uses it."""

    bandwidth: float = math.inf
    latency: float = 0.0
    transport: Transport = field(default_factory=Transport)

    def __post_init__(self) -> None:
        if not (_is_number(self.bandwidth) and self.bandwidth > 0):
            raise ConfigurationError(f"bandwidth must be a positive number of bits per second; got {self.bandwidth!r}")
        if not (_is_number(self.latency) and 0 <= self.latency < math.inf):
            raise ConfigurationError(f"latency must be a number of seconds; got {self.latency!r}")
        if not isinstance(self.transport, Transport):
            raise ConfigurationError(f"transport must be a Transport; got {self.transport!r}")

    @property
    def goodput(self) -> float:
        """Bits per second of payload that all transfers together have."""
        return min(self.transport.efficiency * self.bandwidth, self.transport.ceiling)

    @property
    def most_of_one(self) -> float:
        """Bits per second that one transfer has at most: a window per round trip."""
        return math.inf if self.latency == 0 else 8 * self.transport.window / (2 * self.latency)

    def seconds(self, traffic: Traffic) -> float:
        """What a transfer takes alone."""
        return 8 * traffic.bytes / min(self.goodput, self.most_of_one) + self.latency * traffic.rounds


@dataclass(frozen=True, kw_only=True)
class Compute:
    """Seconds that one step computes, when in it each gradient is there, and when each parameter is used.

    ``ready`` gives, by parameter name, seconds after the beginning of the backward pass; a gradient without an entry
    comes when the backward pass ends. ``needed`` gives seconds after the beginning of the forward pass; a parameter without an
    entry is used from the beginning.
    """

    forward: float
    backward: float
    optimizer: float = 0.0
    ready: Mapping[str, float] = field(default_factory=dict)
    needed: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("forward", "backward", "optimizer"):
            if not (_is_number(getattr(self, name)) and 0 <= getattr(self, name) < math.inf):
                raise ConfigurationError(f"{name} must be a number of seconds; got {getattr(self, name)!r}")
        for what, where in (("ready", "backward"), ("needed", "forward")):
            seconds = getattr(self, where)
            for name, moment in getattr(self, what).items():
                if not (_is_number(moment) and 0 <= moment <= seconds * (1 + 1e-9)):
                    raise ConfigurationError(f"{what}[{name!r}] is {moment!r}, not within the {where} pass of {seconds:g} s")

    @property
    def seconds(self) -> float:
        """The whole step, computation alone."""
        return self.forward + self.backward + self.optimizer

    def at_speed(self, speed: float) -> "Compute":
        """On a device that is so many times as fast."""
        if speed == 1:
            return self
        return Compute(
            forward=self.forward / speed,
            backward=self.backward / speed,
            optimizer=self.optimizer / speed,
            ready={name: moment / speed for name, moment in self.ready.items()},
            needed={name: moment / speed for name, moment in self.needed.items()},
        )

    def ready_at(self, names: Iterable[str]) -> float:
        """When the last of these gradients is there, in seconds after the beginning of the backward pass."""
        return max((self.ready.get(name, self.backward) for name in names), default=0.0)

    def needed_at(self, names: Iterable[str]) -> float:
        """When the first of these parameters is used, in seconds after the beginning of the forward pass; its end if none is.

        The numbers of use that travel among them are nothing that a module waits for.
        """
        used = (name for name in names if name != USAGE)
        return min((self.needed.get(name, 0.0) for name in used), default=self.forward)

    @classmethod
    def uniform(cls, model: nn.Module, *, forward: float, backward: float, optimizer: float = 0.0) -> "Compute":
        """Forward goes through the parameters, and backward in reverse, each taking time in proportion to its size."""
        backwards = list(reversed(_trainable(model).items()))
        total, done = max(1, sum(p.numel() for _, p in backwards)), 0
        ready, needed = {}, {}
        for name, parameter in backwards:
            done += parameter.numel()
            ready[name], needed[name] = backward * done / total, forward * (1 - done / total)
        return cls(forward=forward, backward=backward, optimizer=optimizer, ready=ready, needed=needed)

    @classmethod
    def layered(cls, model: nn.Module, layers: Mapping[str, tuple[float, float]], *, optimizer: float = 0.0) -> "Compute":
        """From measured (forward, backward) seconds by layer, in forward order.

        A layer's gradients are there when its backward is done, its parameters used when its forward begins. A parameter
        belongs to the layer with the longest name that its own begins with; ``""`` holds whatever is left.
        """
        done, ends = 0.0, {}
        for layer, (_, seconds) in reversed(list(layers.items())):
            done = ends[layer] = done + seconds
        begins = dict(zip(layers, accumulate((forward for forward, _ in layers.values()), initial=0.0), strict=False))
        layer_of = {name: _layer_of(name, layers) for name in _trainable(model)}
        return cls(
            forward=sum(forward for forward, _ in layers.values()),
            backward=done,
            optimizer=optimizer,
            ready={name: ends[layer] for name, layer in layer_of.items()},
            needed={name: begins[layer] for name, layer in layer_of.items()},
        )


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)


def _trainable(model: nn.Module) -> dict[str, Parameter]:
    return {name: parameter for name, parameter in named_parameters(model).items() if parameter.requires_grad}


def _layer_of(name: str, layers: Iterable[str]) -> str:
    holding = [layer for layer in layers if layer == "" or name.startswith(f"{layer}.")]
    if not holding:
        raise ConfigurationError(f"parameter {name!r} belongs to none of the layers {', '.join(layers)}")
    return max(holding, key=len)
