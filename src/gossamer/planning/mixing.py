"""Mixing: with how many workers' exact average the averaging of weights compares.

The effective number of neighbours of Vogels, Hendrikx and Jaggi (2022, "Beyond spectral gap"): workers that add noise to their
weights and mix them, x ← W(√decay·x + noise), have 1/n of the variance that they would have alone.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import numpy as np

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.algorithms.cadence import Beat
from gossamer.comm.ops import Group
from gossamer.comm.topology import Exchange, Permutation, mixing_matrix
from gossamer.errors import ConfigurationError

DECAY = 0.93
"""How much of the variance of a worker's deviation is still there after a step. Fitted on six runs of a GPT with
``GossipAdamW``; one number for each optimizer and workload, so others may have another one."""


def neighbours(algorithm: Algorithm, world: int, nodes: tuple[Group, ...] | None = None, decay: float = DECAY) -> float:
    """The effective number of neighbours of ``algorithm`` among ``world`` workers: ``world`` where gradients are averaged.

    Raises:
        ConfigurationError: ``decay`` is not between 0 and 1.
    """
    if not 0 < decay < 1:
        raise ConfigurationError(f"decay must be between 0 and 1; got {decay!r}")
    if algorithm.part("weights") is None or world == 1:
        return float(world)
    steps = int(8 / (1 - decay)) + 64
    covariance, variances = np.zeros((world, world)), []
    for number, matrix in enumerate(islice(mixing(algorithm, world, nodes), steps)):
        covariance = matrix @ (decay * covariance + np.eye(world)) @ matrix.T
        if number >= steps // 2:
            variances.append(float(np.trace(covariance)) / world)
    return 1 / (1 - decay) / float(np.mean(variances))


def mixing(algorithm: Algorithm, world: int, nodes: tuple[Group, ...] | None = None) -> Iterator[Any]:
    """The matrices by which steps multiply the workers' weights, one after the other: ``float64[world, world]`` each.

    Of weights that are exchanged in parts, those of one part. By node, workers of one are averaged in every step.
    """
    cadence, per_node = algorithm.cadence, algorithm.traits.ranks_per_node
    by_node = algorithm.traits.nodes and (consecutive(world, per_node) if per_node else nodes)
    groups = by_node or consecutive(world, 1)
    inside = _within(groups, world)
    for step in count(1):
        matrix = inside
        for beat in cadence.beats:
            if beat.offset % cadence.parts == 0 and beat.due(step):
                matrix = _between(beat, step, groups, world) @ matrix
        yield matrix


def _within(groups: tuple[Group, ...], world: int) -> Any:
    """The average of each group's ranks."""
    matrix = np.zeros((world, world))
    for group in groups:
        matrix[np.ix_(group, group)] = 1 / len(group)
    return matrix


def _between(beat: Beat, step: int, groups: tuple[Group, ...], world: int) -> Any:
    """An exchange of the groups, or among all."""
    number = step // beat.every
    if beat.topology is None or (beat.exchanges > 1 and number % beat.exchanges == 0):  # GossipPGA's average of all
        return np.full((world, world), 1 / world)
    edges = beat.topology.at(number, len(groups))
    if not isinstance(edges, Permutation | Exchange):
        raise ConfigurationError(f"{beat.topology} is directed: how it mixes is not known")
    small: Any = np.array(mixing_matrix(edges))
    matrix = np.zeros((world, world))
    for row, to in enumerate(groups):
        for column, source in enumerate(groups):
            matrix[np.ix_(to, source)] = small[row, column] / len(source)
    return matrix
