"""Meeting: what algorithms over weights have in common, and those of them whose workers meet as a topology says."""

from collections.abc import Sequence
from typing import Any, ClassVar

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.cadence import Cadence, every
from gossamer.algorithms.traits import Traits
from gossamer.checks import is_number, is_whole
from gossamer.comm.mixing import check_connected
from gossamer.comm.ops import Group
from gossamer.comm.topology import Pattern, Topology
from gossamer.errors import ConfigurationError


class Spaced(Algorithm, register=False):
    """What algorithms over weights that exchange them ``every`` so many steps have in common.

    Not a dataclass: those below it declare the fields, each with its own defaults.
    """

    every: int

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights")

    @property
    def cadence(self) -> Cadence:
        return every(self.every)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_steps("every", self.every)


class Meeting(Spaced, register=False):
    """The same, where workers meet as a ``topology`` says."""

    topology: Any
    lag: int

    topologies: ClassVar[Any] = Topology
    """What a topology may be."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.topology, self.topologies):
            directed = self.topologies is not Topology
            where = "gossamer.comm.topology or gossamer.comm.digraph" if directed else "gossamer.comm.topology"
            hint = "; directed ones go with PushSum" if isinstance(self.topology, Pattern) else ""
            raise ConfigurationError(f"topology must be one of {where}, such as Ring(); got {self.topology!r}{hint}")
        check_steps("lag", self.lag, least=0)

    @property
    def cadence(self) -> Cadence:
        return every(self.every, lag=self.lag, topology=self.topology)

    def check(self, world: int, nodes: Sequence[Group] | None = None) -> None:
        try:
            check_connected(self.topology, world)
        except ValueError as error:
            raise ConfigurationError(f"{type(self).__name__}: {error}") from error


def check_steps(name: str, value: object, least: int = 1) -> None:
    """Raise ConfigurationError unless ``value`` is a number of steps."""
    if not is_whole(value, least):
        raise ConfigurationError(f"{name} must be a number of steps, at least {least}; got {value!r}")


def check_ahead(ahead: object, lag: int) -> None:
    """Raise ConfigurationError unless messages may be so many updates ahead."""
    if not is_number(ahead) or not 0 <= ahead <= MOST_AHEAD:
        raise ConfigurationError(f"ahead must be a number of updates from 0 to {MOST_AHEAD}; got {ahead!r}")
    if ahead and lag:
        raise ConfigurationError(
            "ahead does not go with lag: it foresees one update, and nobody knows how many an exchange that lags will take"
        )


MOST_AHEAD = 2
"""Updates that a message may be ahead. A GPT with four workers: 1 is best; 2 is better than 0 where a weight is averaged in
every third step, and worse in every second one; with 4 the loss stays 0.4 to 0.6 nats behind, because both partners
correct what has not happened yet, and correct it again."""
