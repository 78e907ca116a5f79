"""Cluster: the machines that train together, their links at every level, and how unequal their workers are."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from gossamer.checks import is_number, is_whole
from gossamer.errors import ConfigurationError
from gossamer.simulate.kernels import SHARES_OF_COPY
from gossamer.simulate.profile import Link

MOST_WORKERS = 2**20
"""Of one cluster: as many as anybody will train with soon. With more, a prediction would not end, or not fit into memory."""

Distribution = Literal["lognormal", "exponential"]


@dataclass(frozen=True, kw_only=True)
class Machines:
    """``count`` machines with ``devices`` workers each. Worker r is on machine r // devices.

    ``speed`` of a device: relative to the one that the computation was measured on. ``sites``: in how many places of as many
    machines they stand, consecutive ones together; machines of different sites reach each other over ``Cluster.across``.
    """

    count: int
    devices: int = 1
    device: str = ""
    speed: float = 1.0
    sites: int = 1

    def __post_init__(self) -> None:
        for name in ("count", "devices", "sites"):
            if not is_whole(getattr(self, name), 1):
                raise ConfigurationError(f"{name} must be a whole number, at least 1; got {getattr(self, name)!r}")
        if not isinstance(self.device, str):
            raise ConfigurationError(f"device must be a name; got {self.device!r}")
        _check_above_zero(speed=self.speed)
        if self.count % self.sites:
            raise ConfigurationError(f"{self.count} machines cannot stand in {self.sites} sites of as many machines each")
        if self.world > MOST_WORKERS:
            raise ConfigurationError(
                f"{self.count} machines of {self.devices} devices are more than the {MOST_WORKERS:,} workers that can be "
                "predicted; give a smaller count"
            )

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.count * self.devices


@dataclass(frozen=True, kw_only=True)
class Processor:
    """What a machine's workers share for codecs, copies and the transport's own work.

    ``cores``: how many such tasks run at full speed; more than these share them. ``copy``: bytes per second that one of them
    copies; infinite: copies and kernels take no time. ``kernels``: bytes of gradient per second by codec and kernel, as in
    ``benchmarks/results/kernels.md`` ("8 bits, encode"); those without an entry take the share of a copy that they have there.
    ``transport``: bytes per second that one of them hands to the network, and takes from it. ``message``: seconds that each
    message takes whatever its size. ``computes``: whether the forward and backward pass and the optimizer run on it as well, so
    that what flows compute delays them. ``machines``: how many machines share it; above 1 where they are emulated on one.
    """

    cores: int = 1
    copy: float = math.inf
    kernels: Mapping[str, float] = field(default_factory=dict)
    transport: float = math.inf
    message: float = 0.0
    computes: bool = True
    machines: int = 1

    def __post_init__(self) -> None:
        for name in ("cores", "machines"):
            if not is_whole(getattr(self, name), 1):
                raise ConfigurationError(f"{name} must be a whole number, at least 1; got {getattr(self, name)!r}")
        unknown = [name for name in self.kernels if name not in SHARES_OF_COPY]
        if unknown:
            raise ConfigurationError(f"kernels has {unknown[0]!r}, which is none of {', '.join(map(repr, SHARES_OF_COPY))}")
        _check_above_zero(
            copy=self.copy,
            transport=self.transport,
            **{f"kernels[{name!r}]": speed for name, speed in self.kernels.items()},
        )
        if not (is_number(self.message) and 0 <= self.message < math.inf):
            raise ConfigurationError(f"message must be a number of seconds; got {self.message!r}")
        if not isinstance(self.computes, bool):
            raise ConfigurationError(f"computes must be True or False; got {self.computes!r}")

    @property
    def free(self) -> bool:
        """Whether nothing that is done on it takes time."""
        return math.isinf(self.copy) and math.isinf(self.transport) and self.message == 0 and not self.kernels


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Every worker stands still for ``seconds``, once in ``every`` seconds of computing in the mean, at random."""

    every: float
    seconds: float

    def __post_init__(self) -> None:
        _check_above_zero(every=self.every, seconds=self.seconds)


@dataclass(frozen=True, kw_only=True)
class Stragglers:
    """How the times of workers differ.

    ``jitter``: the standard deviation of the time that a worker computes in a step, as a share of its mean, drawn anew for
    every worker and step. ``distribution``: "lognormal", or "exponential" (a fixed part and an exponential one, so that jitter
    1 is an exponential time). ``slow``: by which factor machines, by number, take longer. ``seed``: of what is drawn.
    ``steps``: how many are drawn for a prediction; by default so many that their mean is certain to about 1 %.
    """

    jitter: float = 0.0
    distribution: Distribution = "lognormal"
    slow: Mapping[int, float] = field(default_factory=dict)
    pauses: Pauses | None = None
    seed: int = 0
    steps: int | None = None

    def __post_init__(self) -> None:
        if not (is_number(self.jitter) and 0 <= self.jitter <= 1):
            raise ConfigurationError(f"jitter must be a share of the mean, from 0 to 1; got {self.jitter!r}")
        if self.distribution not in ("lognormal", "exponential"):
            raise ConfigurationError(f"distribution must be 'lognormal' or 'exponential'; got {self.distribution!r}")
        _check_machines("slow", self.slow)
        _check_above_zero(**{f"slow[{number}]": factor for number, factor in self.slow.items()})
        if not (self.pauses is None or isinstance(self.pauses, Pauses)):
            raise ConfigurationError(f"pauses must be Pauses(every=, seconds=); got {self.pauses!r}")
        if not is_whole(self.seed, 0):
            raise ConfigurationError(f"seed must be an integer, at least 0; got {self.seed!r}")
        if not (self.steps is None or is_whole(self.steps, 10)):
            raise ConfigurationError(f"steps must be a whole number, at least 10; got {self.steps!r}")

    @property
    def none(self) -> bool:
        """Whether all workers are equal in every step."""
        return self.jitter == 0 and self.pauses is None and all(factor == 1 for factor in self.slow.values())


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """What :func:`gossamer.simulate.step_time` must know of a cluster.

    ``between``: the link of each machine to the others, which its workers share; ``own``: of single machines, by number, where
    it is another one. ``inside``: the link of each worker to the others of its machine; None: without delay. ``across``: the
    link of each site to the others, which its machines share; None: that of a machine is the only limit.
    """

    name: str = ""
    machines: Machines
    between: Link
    inside: Link | None = None
    across: Link | None = None
    own: Mapping[int, Link] = field(default_factory=dict)
    processor: Processor = field(default_factory=Processor)
    stragglers: Stragglers = field(default_factory=Stragglers)

    def __post_init__(self) -> None:
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if not (isinstance(value, kind) or (value is None and name in ("inside", "across"))):
                raise ConfigurationError(f"{name} must be an instance of {kind.__name__}; got {value!r}")
        _check_machines("own", self.own)
        if not all(isinstance(link, Link) for link in self.own.values()):
            raise ConfigurationError(f"own must hold a Link of each machine that it names; got {dict(self.own)!r}")
        count = self.machines.count
        for name, numbers in (("own", self.own), ("stragglers.slow", self.stragglers.slow)):
            unknown = sorted(number for number in numbers if number >= count)
            if unknown:
                raise ConfigurationError(f"{name} names machine {unknown[0]}; there are {count}, from 0 to {count - 1}")
        if self.across is not None and self.machines.sites == 1:
            raise ConfigurationError("across= is the link between sites, and there is one: say machines.sites, or leave it out")

    @property
    def world(self) -> int:
        """Number of workers."""
        return self.machines.world


_KINDS = {
    "machines": Machines,
    "between": Link,
    "inside": Link,
    "across": Link,
    "processor": Processor,
    "stragglers": Stragglers,
}


def _check_above_zero(**numbers: object) -> None:
    for name, value in numbers.items():
        if not (is_number(value) and value > 0):
            raise ConfigurationError(f"{name} must be a number above 0; got {value!r}")


def _check_machines(name: str, numbers: Mapping[int, object]) -> None:
    if not isinstance(numbers, Mapping) or not all(is_whole(number, 0) for number in numbers):
        raise ConfigurationError(f"{name} must be a mapping of machine numbers, from 0 on; got {numbers!r}")
