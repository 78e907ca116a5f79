"""Mixing: how fast a topology spreads what one rank knows, by numbers; pure functions like the topologies themselves."""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from gossamer.checks import is_whole
from gossamer.comm.digraph import Digraph
from gossamer.comm.topology import FAMILY, Edges, Exchange, Pattern, Topology, mixing_matrix, rounds
from gossamer.errors import ConfigurationError


def checked(topology: Pattern, step: int, world: int) -> Edges:
    """What ``topology.at(step, world)`` returns. Raises ConfigurationError if it is something else than it should be."""
    edges: object = topology.at(step, world)
    wanted = (Exchange,) if isinstance(topology, Topology) else (Exchange, Digraph)
    names = " or ".join(each.__name__ for each in wanted)
    if not isinstance(edges, wanted):
        raise ConfigurationError(
            f"{topology}.at({step}, {world}) must return an {names} (see gossamer.comm.topology.exchange); got {edges!r}"
        )
    if edges.world != world:
        raise ConfigurationError(f"{topology}.at({step}, {world}) must return an {names} of {world} ranks; got {edges!r}")
    return edges


_LOOKED_AT = 256
"""Ranks up to which the project's own topologies are looked at like any other; that they connect more follows from their rule,
and to look at thousands takes minutes."""


def _is_known(topology: Pattern, world: int) -> bool:
    return world > _LOOKED_AT and topology in FAMILY


def check_pattern(topology: Pattern, world: int) -> None:
    """Raise ConfigurationError unless the first cycle of a topology is what algorithms count on: checked one time, not in
    every step."""
    cycle: object = topology.cycle(world)
    if not is_whole(cycle, 1):
        raise ConfigurationError(f"{topology}.cycle({world}) must return a number of steps, at least 1; got {cycle!r}")
    for step in range(1 if _is_known(topology, world) else cycle):
        checked(topology, step, world)


def spread(topology: Pattern, world: int, begin: int = 0) -> Iterator[list[int]]:
    """Whose updates have reached each rank, as bits: at first (its own), and after each step from ``begin`` on, for ever."""
    known = [1 << rank for rank in range(world)]
    for step in count(begin):
        yield known
        before, known = known, list(known)
        pattern = checked(topology, step, world)
        for rank in range(world):
            for destination in pattern.destinations(rank):
                known[destination] |= before[rank]


def check_connected(topology: Pattern, world: int) -> None:
    """Raise ConfigurationError, naming who cannot be reached, unless every rank's update reaches every other rank in the end;
    or if steps of the first cycle are not what they should be (:func:`check_pattern`).

    Looks at the first ``world + 16`` cycles: nothing that repeats itself needs more, and a random pattern that does
    not connect in so many is broken.
    """
    check_pattern(topology, world)
    if _is_known(topology, world):
        return
    everyone = 2**world - 1
    for known in islice(spread(topology, world), (world + 16) * topology.cycle(world)):
        if all(each == everyone for each in known):
            return
    for origin in range(world):
        unreachable = [rank for rank in range(world) if not known[rank] >> origin & 1]
        if unreachable:
            names = ", ".join(map(str, unreachable))
            raise ConfigurationError(
                f"{topology} does not connect {world} ranks: what rank {origin} learns never reaches rank"
                f"{'s' * (len(unreachable) > 1)} {names}"
            )


def product(topology: Topology, world: int, steps: int, begin: int = 0) -> Any:
    """The matrix that ``steps`` steps of averaging multiply the ranks' values with: float64 ``(world, world)`` (NumPy)."""
    import numpy as np

    result = np.eye(world)
    for step in range(begin, begin + steps):
        result = np.array(mixing_matrix(topology.at(step, world))) @ result
    return result


def disagreement(topology: Topology, world: int, steps: int) -> float:
    """What is left of the ranks' distance from their mean after ``steps`` steps, in the worst case: 1 at first, 0 is consensus.

    The spectral norm of (product of the mixing matrices − the exact average).
    """
    import numpy as np

    return float(np.linalg.norm(product(topology, world, steps) - 1 / world, 2)) if world > 1 else 0.0


def spectral_gap(topology: Topology, world: int) -> float:
    """By how much one whole cycle from step 0 shrinks the ranks' distance from their mean: 1 is exact consensus, 0 nothing.

    1 minus the second largest singular value of the product of the cycle's mixing matrices, which holds for directed
    patterns as well. Cycles differ in length, see :meth:`Topology.cycle`.
    """
    return 1 - disagreement(topology, world, topology.cycle(world))


def typical_disagreement(topology: Topology, world: int, steps: int) -> float:
    """As :func:`disagreement`, for values that are independent between ranks: the root mean square instead of the worst."""
    import numpy as np

    left = product(topology, world, steps) - 1 / world
    return float(np.linalg.norm(left) / max(1, world - 1) ** 0.5)


def messages(topology: Topology, world: int) -> float:
    """Messages that a rank sends per step, on average over ranks and one cycle."""
    cycle = topology.cycle(world)
    sent = sum(len(topology.at(step, world).destinations(rank)) for step in range(cycle) for rank in range(world))
    return sent / (cycle * world)


def slowest_spread(topology: Topology, world: int) -> int:
    """Steps that an update needs to reach every rank, from the worst step of a cycle on.

    Raises ConfigurationError if it never does.
    """
    check_connected(topology, world)
    everyone, worst = 2**world - 1, 0
    for begin in range(max(topology.cycle(world), rounds(world))):
        reached = (all(each == everyone for each in known) for known in spread(topology, world, begin))
        worst = max(worst, next(step for step, done in enumerate(reached) if done))
    return worst
