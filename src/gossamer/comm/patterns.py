"""Pattern: what a topology is made of, permutations and exchanges of one step, and what every topology answers.

Nothing here knows about tensors, processes or networks: a pattern is data, so that a runner may execute one
generator for all ranks, and a test may check a law for every world size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Protocol

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

    repeats: ClassVar[bool] = False
    """Whether it is the same again after each :meth:`cycle`, so that no step of a later one has to be worked out."""

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


def exchange_at(topology: Topology, step: int, world: int) -> Exchange:
    """:meth:`Topology.at`, once for all buckets of a step, and for all cycles: among thousands of ranks it takes longer than to
    send."""
    return _exchange_at(topology, step % topology.cycle(world) if topology.repeats else step, world)


@lru_cache(maxsize=64)
def _exchange_at(topology: Topology, step: int, world: int) -> Exchange:
    return topology.at(step, world)


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
