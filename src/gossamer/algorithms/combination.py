"""Combination: what algorithms that are made of others have in common."""

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm, Context
from gossamer.checks import hint_at_class
from gossamer.comm.ops import Group
from gossamer.errors import ConfigurationError
from gossamer.memory import wide


class Combination(Algorithm, register=False):
    """An algorithm made of others. Not a dataclass: those below it declare the fields."""

    @property
    @abstractmethod
    def parts(self) -> tuple[Algorithm, ...]:
        """The algorithms that it is made of."""

    def fuse_as(self, part: Algorithm) -> None:
        """Have buckets as long as those of a part: while it is made, before anyone has seen it."""
        object.__setattr__(self, "bucket_bytes", part.bucket_bytes)

    @property
    def keeps_back(self) -> bool:
        return any(part.keeps_back for part in self.parts)

    @property
    def averages_buffers(self) -> bool:  # type: ignore[override]
        """As the strictest part."""
        return all(part.averages_buffers for part in self.parts)

    @property
    def weighs(self) -> bool:  # type: ignore[override]
        """As soon as one part does."""
        return any(part.weighs for part in self.parts)

    @property
    def moves_mean(self) -> bool:  # type: ignore[override]
        """As soon as one part does."""
        return any(part.moves_mean for part in self.parts)

    @property
    def finishes(self) -> bool:
        return any(part.finishes for part in self.parts)

    def gradients_apart(self, ctx: Context) -> int:
        return max(part.gradients_apart(ctx) for part in self.parts)

    @property
    def exchanges_history(self) -> bool:
        return any(part.exchanges_history for part in self.parts)

    @property
    def lands_late(self) -> bool:
        return any(part.lands_late for part in self.parts)

    def ahead_at(self, step: int) -> float:
        return max(part.ahead_at(step) for part in self.parts)

    def detach(self, optimizers: Sequence[Optimizer]) -> None:
        for part in self.parts:
            part.detach(optimizers)

    def check(self, world: int) -> None:
        for part in self.parts:
            part.check(world)

    def check_machines(self, machines: Sequence[Group]) -> None:
        for part in self.parts:
            part.check_machines(machines)

    @property
    def takes_momentum(self) -> bool:
        return any(part.takes_momentum for part in self.parts)

    @property
    def changes(self) -> frozenset[int]:
        return frozenset().union(*(part.changes for part in self.parts))

    @property
    def asks_for_machines(self) -> bool:
        return any(part.asks_for_machines for part in self.parts)

    @property
    def workers_per_machine(self) -> int | None:
        """As the parts that say so, if they agree."""
        said = {part.workers_per_machine for part in self.parts} - {None}
        return said.pop() if len(said) == 1 else None

    @property
    def by_machine(self) -> bool:
        return any(part.by_machine for part in self.parts)

    @property
    def traffic_period(self) -> int:
        return math.lcm(*(part.traffic_period for part in self.parts))

    def traffic_cycle(self, world: int, machines: int) -> int:
        return math.lcm(*(part.traffic_cycle(world, machines) for part in self.parts))


def joined(first: str, second: str) -> str:
    """One label of two, whatever they contain."""
    return f"{len(first)}:{first}{second}"


def split(label: str) -> tuple[str, str]:
    """The reverse of :func:`joined`."""
    length, _, both = label.partition(":")
    return both[: int(length)], both[int(length) :]


def total(debts: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of what several owe; None if none of them owes anything."""
    some = [wide(debt) for debt in debts if debt is not None]
    return sum(some[1:], start=some[0]) if some else None


def refuse_momentum(part: Algorithm, where: str) -> None:
    """Refuse an algorithm that takes over the momentum of all parameters, where it does not see them all."""
    if part.takes_momentum:
        raise ConfigurationError(
            f"{where}: {part!r} takes the momentum out of the optimizer, and what it does not exchange would have none; "
            "set momentum_correction=False (a dense start is ChunkSparse's own warmup=)"
        )


def refuse_lag(part: Algorithm, where: str) -> None:
    """Raise ConfigurationError for an algorithm whose exchanges are not bound to steps, in a combination that needs them."""
    if part.may_lag:
        raise ConfigurationError(f"{where}: all ranks must be at the same step, but {part!r} lets them lag; set lag=0")


def check_parts(*parts: Algorithm | None) -> None:
    """Refuse what after() and by_size() cannot combine."""
    for part in parts:
        if part is not None and not isinstance(part, Algorithm):
            raise ConfigurationError(
                f"after() and by_size() combine instances of gossamer algorithms; got {part!r}{hint_at_class(part)}"
            )
        if part is not None and part.moves_mean and any(other is not None and other.exchanges_history for other in parts):
            raise ConfigurationError(
                f"after() and by_size(): {part!r} moves the mean of what it exchanges, and what an optimizer remembers must "
                "not be moved: give GossipGraD(history=False)"
            )
        if part is not None:
            refuse_lag(part, "after() and by_size()")
            refuse_momentum(part, "after() and by_size()")
