"""Topology: who sends to whom, as pure functions of (step, world). The family, each with its source.

Every step of every topology is a handful of permutations whose messages are averaged with equal weights. That is doubly
stochastic by construction (a convex combination of permutations), so the mean over the ranks is preserved for every
world size without a correction. What they are made of is in :mod:`gossamer.comm.patterns`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gossamer.comm.patterns import (
    Edges,
    Exchange,
    Pattern,
    Permutation,
    Topology,
    are_ranks,
    check_seed,
    exchange,
    exchange_at,
    mixing_matrix,
    rounds,
    shift,
    shuffled,
)
from gossamer.errors import ConfigurationError

__all__ = [
    "FAMILY",
    "Complete",
    "Dissemination",
    "Edges",
    "Exchange",
    "Hypercube",
    "OnePeerExponential",
    "Pattern",
    "Permutation",
    "RandomMatching",
    "Ring",
    "Rotated",
    "ShiftOne",
    "Topology",
    "are_ranks",
    "check_seed",
    "dissemination",
    "exchange",
    "exchange_at",
    "mixing_matrix",
    "rotated",
    "rounds",
    "shift",
    "shuffled",
]


def dissemination(step: int, world: int) -> Permutation:
    """The partners of GossipGraD at ``step``: send to ``rank − 2^h``, receive from ``rank + 2^h``, h cycling.

    For ``world = 2^k``, ``k`` successive steps of averaging give every rank the exact mean. Any world size works.
    Source: Daily et al. 2018 (arXiv 1803.05880).
    """
    return shift(2 ** (step % rounds(world)) % world, world)


@dataclass(frozen=True)
class Dissemination(Topology):
    """Send to ``rank − 2^h``, receive from ``rank + 2^h``, h cycling. Daily et al. 2018 (arXiv 1803.05880)."""

    repeats = True

    def at(self, step: int, world: int) -> Exchange:
        return exchange(world, [dissemination(step, world)])


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """Send to ``rank + 2^h``, receive from ``rank − 2^h``, h cycling: the mirror image of dissemination.

    Source: Assran et al. 2019 (arXiv 1811.10792); its exact consensus: Ying et al. 2021 (arXiv 2110.13363).
    """

    repeats = True

    def at(self, step: int, world: int) -> Exchange:
        return exchange(world, [shift(-(2 ** (step % rounds(world))) % world, world)])


@dataclass(frozen=True)
class Hypercube(Topology):
    """Pairs: ``rank`` and ``rank XOR 2^h`` exchange, h cycling. Only for ``world = 2^k``. Daily et al. 2018."""

    repeats = True

    def at(self, step: int, world: int) -> Exchange:
        if world & (world - 1):
            raise ConfigurationError(f"a hypercube has 2^k corners; {world} ranks are not a power of two: take Dissemination()")
        if world == 1:
            return exchange(world, [])
        return exchange(world, [Permutation(tuple(rank ^ 2 ** (step % rounds(world)) for rank in range(world)))])


@dataclass(frozen=True)
class Ring(Topology):
    """Every rank averages with both neighbours (thirds), or sends down and receives from above (``directed``: halves).

    Source: Lian et al. 2017 (arXiv 1705.09056).
    """

    repeats = True
    directed: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.directed, bool):
            raise ConfigurationError(f"directed must be True or False; got {self.directed!r}")

    def at(self, step: int, world: int) -> Exchange:
        down, up = shift(1 % world, world), shift(-1 % world, world)
        return exchange(world, [down] if self.directed else [down, up])

    def cycle(self, world: int) -> int:
        return 1


@dataclass(frozen=True)
class RandomMatching(Topology):
    """Pairs drawn anew in every step, from ``seed``; one rank of an odd number has a bye.

    Source: after the randomized gossip of Boyd et al. 2006 (IEEE Trans. Inf. Theory 52), where one pair meets at a time.
    """

    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)

    def at(self, step: int, world: int) -> Exchange:
        order = shuffled(world, self.seed, step)
        return exchange(world, [_pairs(world, zip(order[0::2], order[1::2], strict=False))])


@dataclass(frozen=True)
class ShiftOne(Topology):
    """Pairs between the lower and the upper half of the ranks, shifted by one in every step; a bye for odd worlds.

    Source: ``shift_one`` of BAGUA (Gan et al. 2021, arXiv 2107.01499), which needs an even world.
    """

    repeats = True

    def at(self, step: int, world: int) -> Exchange:
        half = self.cycle(world)
        pairs = ((low, half + (low + step) % half) for low in range(half))
        return exchange(world, [_pairs(world, (pair for pair in pairs if pair[1] < world))])

    def cycle(self, world: int) -> int:
        return (world + 1) // 2


@dataclass(frozen=True)
class Complete(Topology):
    """Every rank sends to all others: the exact mean in one step, for ``world − 1`` messages per rank."""

    repeats = True

    def at(self, step: int, world: int) -> Exchange:
        return exchange(world, (shift(distance, world) for distance in range(1, world)))

    def cycle(self, world: int) -> int:
        return 1


@dataclass(frozen=True)
class Rotated(Topology):
    """Another topology whose ranks are renumbered every ⌈log2 world⌉ steps, so that partners change.

    Source: the rotation of GossipGraD (Daily et al. 2018), with a new permutation every time instead of p − 1 in turn.
    """

    topology: Topology
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.topology, Topology):
            raise ConfigurationError(f"rotated() takes a topology of permutations, such as Ring(); got {self.topology!r}")
        check_seed(self.seed)

    def at(self, step: int, world: int) -> Exchange:
        number = shuffled(world, self.seed, step // rounds(world))
        plain = self.topology.at(step, world)
        return exchange(world, (_renumber(each, number) for each in plain.permutations))

    def cycle(self, world: int) -> int:
        return max(rounds(world), self.topology.cycle(world))


def rotated(topology: Topology, seed: int = 0) -> Rotated:
    """``topology`` with ranks renumbered every ⌈log2 world⌉ steps, the same way on every rank.

    Raises ConfigurationError for what is no topology of permutations (the directed ones of :mod:`gossamer.comm.digraph` are
    drawn anew in every step, or for fixed ranks).
    """
    return Rotated(topology, seed)


FAMILY: tuple[Topology, ...] = (
    Dissemination(),
    OnePeerExponential(),
    Hypercube(),
    Ring(),
    Ring(directed=True),
    RandomMatching(),
    ShiftOne(),
    Complete(),
)
"""One of each."""


def _pairs(world: int, pairs: Iterable[tuple[int, int]]) -> Permutation:
    """Both of each pair send to each other; everyone else has a bye."""
    to = list(range(world))
    for one, other in pairs:
        to[one], to[other] = other, one
    return Permutation(tuple(to))


def _renumber(permutation: Permutation, number: Sequence[int]) -> Permutation:
    """The same messages between ranks that play other parts: what ``i`` was, ``number[i]`` now is."""
    to = [0] * permutation.world
    for part, rank in enumerate(number):
        to[rank] = number[permutation.to[part]]
    return Permutation(tuple(to))
