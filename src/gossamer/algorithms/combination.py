"""Combination: what algorithms that are made of others have in common."""

import math
from abc import abstractmethod
from collections.abc import Sequence

from gossamer.algorithms.base import Algorithm
from gossamer.comm.ops import Group
from gossamer.errors import ConfigurationError


class Combination(Algorithm, register=False):
    """An algorithm made of others. Not a dataclass: those below it declare the fields."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Algorithm, ...]:
        """The algorithms that it is made of."""

    @property
    def serial(self) -> bool:  # type: ignore[override]
        """As the strictest part."""
        return any(part.serial for part in self.parts)

    @property
    def averages_buffers(self) -> bool:  # type: ignore[override]
        """As the strictest part."""
        return all(part.averages_buffers for part in self.parts)

    def check_machines(self, machines: Sequence[Group]) -> None:
        for part in self.parts:
            part.check_machines(machines)

    @property
    def traffic_period(self) -> int:
        return math.lcm(*(part.traffic_period for part in self.parts))


def refuse_lag(part: Algorithm, where: str) -> None:
    """Raise ConfigurationError for an algorithm whose exchanges are not bound to steps, in a combination that needs them."""
    if part.may_lag:
        raise ConfigurationError(f"{where}: all ranks must be at the same step, but {part!r} lets them lag; set lag=0")
