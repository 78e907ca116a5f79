"""Digraph: directed patterns in which ranks may send to, and receive from, different numbers of others.

Averaging along them does not keep the mean over the ranks; push-sum does, which also carries how much weight came along.
Pure data, as :mod:`gossamer.comm.topology`.
"""

from abc import abstractmethod
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache

from gossamer.checks import is_whole
from gossamer.comm.topology import Edges, Pattern, are_ranks, check_seed, shuffled
from gossamer.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Digraph:
    """One step: rank ``i`` sends to each of ``to[i]``, in ascending order, never to itself."""

    to: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if not isinstance(self.to, tuple):
            raise ConfigurationError(
                f"a digraph is a tuple, whose i-th part holds the ranks that rank i sends to; got {self.to!r}"
            )
        world = len(self.to)
        everyone = set(range(world))
        for rank, targets in enumerate(self.to):
            if not are_ranks(targets) or sorted(set(targets) - {rank}) != list(targets) or not set(targets) <= everyone:
                raise ConfigurationError(
                    f"rank {rank} sends to {targets!r}: it must be a tuple of other ranks below {world}, each once, in order"
                )

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.to)

    def destinations(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` sends to."""
        return self.to[rank]

    def sources(self, rank: int) -> tuple[int, ...]:
        """The ranks that ``rank`` receives from, in ascending order."""
        return _sources(self, rank)

    @property
    def most_messages(self) -> int:
        """Of the rank that sends most, or of the one that receives most, whichever are more."""
        return _most_messages(self)


@lru_cache(maxsize=1024)
def _sources(graph: Digraph, rank: int) -> tuple[int, ...]:
    return tuple(source for source, targets in enumerate(graph.to) if rank in targets)


@lru_cache(maxsize=64)
def _most_messages(graph: Digraph) -> int:
    received = Counter(target for targets in graph.to for target in targets)
    return max([*map(len, graph.to), *received.values()], default=0)


class DirectedTopology(Pattern):
    """A pattern in which ranks may send more, or less, than they receive."""

    @abstractmethod
    def at(self, step: int, world: int) -> Digraph:
        """The edges of ``step``: see :meth:`Pattern.at`."""


@dataclass(frozen=True)
class RandomPush(DirectedTopology):
    """Every rank sends to ``peers`` others, drawn anew in every step: some receive from several, some from none.

    Source: the push-sum protocol of Kempe et al. 2003 (FOCS), which sends to one.
    """

    peers: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if not is_whole(self.peers, 1):
            raise ConfigurationError(f"peers must be a number of ranks, at least 1; got {self.peers!r}")
        check_seed(self.seed)

    def at(self, step: int, world: int) -> Digraph:
        drawn = []
        for rank in range(world):
            order = shuffled(world, self.seed, step * world + rank)
            drawn.append(tuple(sorted([other for other in order if other != rank][: self.peers])))
        return Digraph(tuple(drawn))


@dataclass(frozen=True)
class OutNeighbours(DirectedTopology):
    """The same edges in every step: rank ``i`` sends to each of ``to[i]``. For one world, that of its length."""

    to: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        Digraph(self.to)

    def at(self, step: int, world: int) -> Digraph:
        if world != len(self.to):
            raise ConfigurationError(f"{self} is for {len(self.to)} ranks; there are {world}")
        return Digraph(self.to)

    def cycle(self, world: int) -> int:
        return 1


@lru_cache(maxsize=64)
def digraph_at(pattern: Pattern, step: int, world: int) -> Digraph:
    """The edges of a step, once for all buckets."""
    return digraph(pattern.at(step, world))


def digraph(pattern: Edges) -> Digraph:
    """The edges of one step of any pattern."""
    if isinstance(pattern, Digraph):
        return pattern
    return Digraph(tuple(tuple(sorted(set(pattern.destinations(rank)))) for rank in range(pattern.world)))


def push_matrix(pattern: Edges) -> list[list[float]]:
    """Row ``i`` holds what rank ``i`` gets of each rank's sum: a sender of k messages keeps 1/(k + 1), as much as each gets.

    Columns sum to 1: nothing is lost. Rows sum to 1 only where as much comes in as goes out.
    """
    graph = digraph(pattern)
    matrix = [[0.0] * graph.world for _ in range(graph.world)]
    for sender, targets in enumerate(graph.to):
        for receiver in (sender, *targets):
            matrix[receiver][sender] = 1 / (len(targets) + 1)
    return matrix
