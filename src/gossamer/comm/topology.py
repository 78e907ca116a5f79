"""Topology: who sends to whom, as pure functions of (step, world).

Nothing here knows about tensors, processes or networks: a pattern is data, so that a runner may execute one
generator for all ranks, and a test may check a law for every world size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache


@dataclass(frozen=True, slots=True)
class Permutation:
    """One message per rank: rank ``i`` sends to ``to[i]`` and receives from the one rank that sends to it.

    Averaging along any permutation with weights ½, ½ is doubly stochastic, so it preserves the mean over the ranks
    for every world size without a correction.
    """

    to: tuple[int, ...]

    def __post_init__(self) -> None:
        if sorted(self.to) != list(range(len(self.to))):
            raise ValueError(f"not a permutation of 0 … {len(self.to) - 1}: {self.to}")

    @property
    def world(self) -> int:
        """Number of ranks."""
        return len(self.to)

    def destination(self, rank: int) -> int:
        """The rank that ``rank`` sends to."""
        return self.to[rank]

    def source(self, rank: int) -> int:
        """The rank that ``rank`` receives from."""
        return self.to.index(rank)


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


def mixing_matrix(permutation: Permutation) -> Sequence[Sequence[float]]:
    """Row ``i`` holds the weights with which rank ``i`` averages: ½ itself, ½ the rank it receives from."""
    world = permutation.world
    matrix = [[0.0] * world for _ in range(world)]
    for rank in range(world):
        matrix[rank][rank] += 0.5
        matrix[rank][permutation.source(rank)] += 0.5
    return matrix
