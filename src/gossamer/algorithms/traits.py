"""Traits: what an algorithm is, as one record; what one that is made of others is follows from theirs."""

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any, Literal

Subject = Literal["gradients", "weights"]


def _weights_if_any(subjects: list[Subject]) -> Subject:
    return "weights" if "weights" in subjects else "gradients"


def _union(sets: list[frozenset[Any]]) -> frozenset[Any]:
    return frozenset().union(*sets)


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What an algorithm is. All of it is known before the first step, and the same on every rank.

    ``join``, beside each field: what it is of several algorithms together.
    """

    subject: Subject = field(default="gradients", metadata={"join": _weights_if_any})
    """What it exchanges: gradients in every step, or weights between two steps."""
    exact: bool = field(default=False, metadata={"join": all})
    """The result is the mean of all workers, to rounding, and zero only where the mean is."""
    takes_shares: bool = field(default=False, metadata={"join": all})
    """It looks at ``Bucket.holds_shares``: gradients are divided by the number of workers when they are copied into their
    bucket, which costs nothing there and a pass over memory later."""
    prompt: bool = field(default=False, metadata={"join": all})
    """An exchange starts all of its operations before it waits for any, and computes next to nothing: no thread of its own
    has to run it."""
    keeps_unsent: bool = field(default=True, metadata={"join": any})
    """Some of a gradient may stay unsent, kept as ``RESIDUAL``, for a later step."""
    takes_momentum: bool = field(default=False, metadata={"join": any})
    """``attach`` takes the momentum out of the optimizer, for as long as the replica is open."""
    history: bool = field(default=False, metadata={"join": any})
    """What the optimizer keeps of each weight (momentum, Adam's moments) is exchanged with it."""
    averages_buffers: bool = field(default=True, metadata={"join": all})
    """Buffers may be averaged with the weights (``buffers="average"``)."""
    weighted: bool = field(default=False, metadata={"join": any})
    """Replicas have weights of their own in the mean that exchanges keep (push-sum): see ``Algorithm.hand_over``."""
    moves_mean: bool = field(default=False, metadata={"join": any})
    """Exchanges of weights move the mean of the workers, as an outer optimizer does. All others keep it."""
    by_samples: bool = field(default=False, metadata={"join": all})
    """Weights, or how far they have come, may count in their mean by ``Context.samples``. Gradients always may."""
    dense: int = field(default=0, metadata={"join": max})
    """In how many first steps of a run an exact mean of the gradients takes its place: replicate() puts that before it."""
    nodes: frozenset[int | None] = field(default=frozenset(), metadata={"join": _union})
    """Of what works by node: how many consecutive ranks each has; None: as the launcher placed them. Empty: no node matters."""

    @property
    def ranks_per_node(self) -> int | None:
        """How many consecutive ranks share a node, if the algorithm says so, and says one number."""
        said = self.nodes - {None}
        return next(iter(said)) if len(said) == 1 else None


def joined(traits: Iterable[Traits]) -> Traits:
    """The traits of an algorithm that is made of those with ``traits``, field by field."""
    each = list(traits)
    return Traits(**{f.name: f.metadata["join"]([getattr(one, f.name) for one in each]) for f in fields(Traits)})
