"""Topology: who sends to whom, as pure functions of (step, world).

Nothing here knows about tensors, processes or networks: a pattern is data, so that a runner may execute one
generator for all ranks, and a test may check a law for every world size.

Every step of every topology is a handful of permutations whose messages are averaged with equal weights. That is doubly
stochastic by construction (a convex combination of permutations), so the mean over the ranks is preserved for every
world size without a correction.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

from gossamer.checks import is_whole
from gossamer.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Permutation:
    """One message per rank: rank ``i`` sends to ``to[i]`` and receives from the one rank that sends to it.

    Averaging along any permutation with weights ½, ½ is doubly stochastic, so it preserves the mean over the ranks
    for every world size without a correction.
    """

    to: tuple[int, ...]

    def __post_init__(self) -> None:
        if not are_ranks(self.to) or sorted(self.to) != list(range(len(self.to))):
            raise ConfigurationError(f"not a permutation of 0, 1, …, as a tuple: {self.to!r}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.to)

    def destination(self, rank: int) -> int:
        """The rank that ``rank`` sends to; itself where it has a bye."""
        return self.to[rank]

    def source(self, rank: int) -> int:
        """The rank that ``rank`` receives from."""
        return self.to.index(rank)


@dataclass(frozen=True, slots=True)
class Exchange:
    """One step: every rank sends along each of ``permutations`` and averages what arrives with its own, in equal parts."""

    world: int
    permutations: tuple[Permutation, ...]

    def __post_init__(self) -> None:
        for each in self.permutations:
            if not isinstance(each, Permutation) or each.world != self.world:
                raise ConfigurationError(
                    f"an exchange among {self.world} ranks is made of permutations of as many; got {each!r}"
                )

    def destinations(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` sends to; none where it has a bye."""
        return tuple(to for each in self.permutations if (to := each.destination(rank)) != rank)

    def sources(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` receives from."""
        return tuple(source for each in self.permutations if (source := each.source(rank)) != rank)

    def weights(self, rank: int) -> dict[int, float]:
        """The weights with which ``rank`` averages, its own among them; they sum to 1."""
        share, result = 1 / (len(self.permutations) + 1), {rank: 0.0}
        for source in (rank, *(each.source(rank) for each in self.permutations)):
            result[source] = result.get(source, 0.0) + share
        return result


def exchange(world: int, permutations: Iterable[Permutation]) -> Exchange:
    """An exchange along those of ``permutations`` that move anything, each of them once."""
    alone = shift(0, world)
    return Exchange(world, tuple(each for each in dict.fromkeys(permutations) if each != alone))


def are_ranks(value: object) -> bool:
    """Whether it is a tuple of integers."""
    return isinstance(value, tuple) and all(isinstance(rank, int) for rank in value)


def check_seed(seed: object) -> None:
    """Raise ConfigurationError unless it is an integer."""
    if not is_whole(seed):
        raise ConfigurationError(f"seed must be an integer; got {seed!r}")


def rounds(world: int) -> int:
    """Length of a dissemination cycle: ⌈log2 world⌉, and at least 1."""
    return max(1, (world - 1).bit_length())


@lru_cache(maxsize=1024)
def shift(distance: int, world: int) -> Permutation:
    """Every rank sends to the one ``distance`` below it, modulo ``world``."""
    return Permutation(tuple((rank - distance) % world for rank in range(world)))


def dissemination(step: int, world: int) -> Permutation:
    """The partners of GossipGraD at ``step``: send to ``rank − 2^h``, receive from ``rank + 2^h``, h cycling.

    For ``world = 2^k``, ``k`` successive steps of averaging give every rank the exact mean. Any world size works.
    Source: Daily et al. 2018 (arXiv 1803.05880).
    """
    return shift(2 ** (step % rounds(world)) % world, world)


def mixing_matrix(pattern: Permutation | Exchange) -> Sequence[Sequence[float]]:
    """Row ``i`` holds the weights with which rank ``i`` averages; a single permutation has ½ and ½."""
    step = Exchange(pattern.world, (pattern,)) if isinstance(pattern, Permutation) else pattern
    matrix = [[0.0] * step.world for _ in range(step.world)]
    for rank, row in enumerate(matrix):
        for source, weight in step.weights(rank).items():
            row[source] = weight
    return matrix


class Edges(Protocol):
    """Who sends to whom in one step."""

    @property
    def world(self) -> int:
        """Number of ranks."""

    def destinations(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` sends to."""

    def sources(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` receives from."""


class Pattern(ABC):
    """Who sends to whom in every step, for every world size (unless it says otherwise).

    Equal on all ranks, whatever the machine: it depends on its fields, the step and the world alone.
    """

    @abstractmethod
    def at(self, step: int, world: int) -> Edges:
        """The edges of ``step`` (0, 1, …) among ``world`` ranks. Raises ConfigurationError for a world it cannot serve."""

    def cycle(self, world: int) -> int:
        """After how many steps it begins anew (patterns drawn at random: how many belong together)."""
        return rounds(world)


class Topology(Pattern):
    """A pattern in which every rank sends as much as it receives, so that averaging keeps the mean."""

    @abstractmethod
    def at(self, step: int, world: int) -> Exchange:
        """The exchange of ``step``: see :meth:`Pattern.at`."""


@dataclass(frozen=True)
class Dissemination(Topology):
    """Send to ``rank − 2^h``, receive from ``rank + 2^h``, h cycling. Daily et al. 2018 (arXiv 1803.05880)."""

    def at(self, step: int, world: int) -> Exchange:
        return exchange(world, [dissemination(step, world)])


@dataclass(frozen=True)
class OnePeerExponential(Topology):
    """Send to ``rank + 2^h``, receive from ``rank − 2^h``, h cycling: the mirror image of dissemination.

    Source: Assran et al. 2019 (arXiv 1811.10792); its exact consensus: Ying et al. 2021 (arXiv 2110.13363).
    """

    def at(self, step: int, world: int) -> Exchange:
        return exchange(world, [shift(-(2 ** (step % rounds(world))) % world, world)])


@dataclass(frozen=True)
class Hypercube(Topology):
    """Pairs: ``rank`` and ``rank XOR 2^h`` exchange, h cycling. Only for ``world = 2^k``. Daily et al. 2018."""

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

    def at(self, step: int, world: int) -> Exchange:
        half = self.cycle(world)
        pairs = ((low, half + (low + step) % half) for low in range(half))
        return exchange(world, [_pairs(world, (pair for pair in pairs if pair[1] < world))])

    def cycle(self, world: int) -> int:
        return (world + 1) // 2


@dataclass(frozen=True)
class Complete(Topology):
    """Every rank sends to all others: the exact mean in one step, for ``world − 1`` messages per rank."""

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


@lru_cache(maxsize=256)
def shuffled(world: int, seed: int, number: int) -> tuple[int, ...]:
    """The ``number``-th permutation of ``seed``: ranks in the order of a hash of (seed, number, rank).

    Integer arithmetic alone, so it is the same under every version of Python and NumPy, on every machine and under
    every hash seed; and any number is found without drawing those before it.
    """
    key = _mixed(_mixed(seed) + number)
    return tuple(sorted(range(world), key=lambda rank: (_mixed(key + rank), rank)))


def _mixed(value: int) -> int:
    """A 64-bit hash of an integer: the output function of SplitMix64 (Steele, Lea, Flood 2014)."""
    value = (value + 1) * 0x9E3779B97F4A7C15 % 2**64
    value = (value ^ value >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    value = (value ^ value >> 27) * 0x94D049BB133111EB % 2**64
    return value ^ value >> 31


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
