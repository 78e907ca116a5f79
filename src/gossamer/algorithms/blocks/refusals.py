"""Refusals: what algorithms that are made of others cannot be made of."""

from gossamer.algorithms.base import Algorithm
from gossamer.checks import hint_at_class
from gossamer.errors import ConfigurationError


def refuse_momentum(part: Algorithm, where: str) -> None:
    """Refuse an algorithm that takes over the momentum of all parameters, where it does not see them all."""
    if part.traits.takes_momentum:
        raise ConfigurationError(
            f"{where}: {part!r} takes the momentum out of the optimizer, and what it does not exchange would have none; "
            "set momentum_correction=False (a dense start is ChunkSparse's own warmup=)"
        )


def refuse_lag(part: Algorithm, where: str) -> None:
    """Raise ConfigurationError for an algorithm whose exchanges are not bound to steps, in a combination that needs them."""
    if part.cadence.lag:
        raise ConfigurationError(f"{where}: all ranks must be at the same step, but {part!r} lets them lag; set lag=0")


def check_parts(*parts: Algorithm) -> None:
    """Refuse what after() and by_size() cannot combine."""
    for part in parts:
        if not isinstance(part, Algorithm):
            raise ConfigurationError(
                f"after() and by_size() combine instances of gossamer algorithms; got {part!r}{hint_at_class(part)}"
            )
    for part in parts:
        if part.traits.moves_mean and any(other.traits.history for other in parts):
            raise ConfigurationError(
                f"after() and by_size(): {part!r} moves the mean of what it exchanges, and what an optimizer remembers must "
                "not be moved: give GossipGraD(history=False)"
            )
        refuse_lag(part, "after() and by_size()")
        refuse_momentum(part, "after() and by_size()")
