"""Unequal workers: what it costs that some compute for longer than others, or have another link."""

from collections.abc import Callable, Iterable

import numpy as np

from gossamer.comm.ops import Group
from gossamer.simulate.cluster import Cluster
from gossamer.simulate.levels import Levels
from gossamer.simulate.program import Operation, Program, Submitted
from gossamer.simulate.replay import Draw, Times, Workers, mean_step
from gossamer.simulate.run import Training, run
from gossamer.simulate.stragglers import draws

LEAST, MOST, DRAWS = 200, 4_000, 1_000_000
"""Steps that are replayed, at least and at most; between them, so many that each number of workers costs about as much."""


def waiting_seconds(training: Training, cluster: Cluster, nodes: tuple[Group, ...], program: Program) -> float:
    """Seconds by which a step of unequal workers takes longer than one of equal workers, which ``program`` was recorded of."""
    stragglers = cluster.stragglers
    world = sum(map(len, nodes))
    steps = stragglers.steps or min(MOST, max(LEAST, DRAWS // world))
    quarter = -(-steps // (4 * len(program))) * len(program)  # whole cycles, of which each step has partners of its own
    seconds = _on_own_links(training, cluster, nodes, program)
    unequal = mean_step(
        Workers(program, world, seconds), draws(stragglers, cluster.machines, training.compute.seconds, 4 * quarter), quarter
    )
    few = -(-8 // len(program)) * len(program)
    equal = mean_step(Workers(program, world), (Draw(np.ones(world)) for _ in range(2 * few)), few)
    return unequal - equal


def _on_own_links(
    training: Training, cluster: Cluster, nodes: tuple[Group, ...], program: Program
) -> Callable[[Operation], Times] | None:
    """How long an operation lasts on the link of each worker's machine: as in a run in which all have such a link."""
    if not cluster.own:
        return None
    kinds = list(dict.fromkeys(cluster.own.values()))
    durations = {id(operation): [operation.seconds] for operation in _operations(program)}
    for link in kinds:
        _, other = run(training, cluster, Levels(cluster, nodes, between=link))
        for operation, same in zip(_operations(program), _operations(other), strict=True):
            durations[id(operation)].append(same.seconds)
    kind_of = np.zeros(len(nodes), np.int64)
    for number, link in cluster.own.items():
        kind_of[number] = 1 + kinds.index(link)
    of_worker = np.repeat(kind_of, [len(node) for node in nodes])
    return lambda operation: np.array(durations[id(operation)])[of_worker]


def _operations(program: Program) -> Iterable[Operation]:
    return (operation for step in program for each in step if isinstance(each, Submitted) for operation in each.flow.operations)
