"""Stragglers: what is drawn for each worker and step, where they compute at different speeds."""

from collections.abc import Iterator

import numpy as np

from gossamer.simulate.cluster import Machines, Stragglers
from gossamer.simulate.replay import Draw, Times


def draws(stragglers: Stragglers, machines: Machines, seconds: float, steps: int) -> Iterator[Draw]:
    """Of ``steps`` steps in which a worker computes for ``seconds`` in the mean."""
    generator = np.random.default_rng(stragglers.seed)
    of_machines = np.ones(machines.count)
    of_machines[list(stragglers.slow)] = list(stragglers.slow.values())
    slow: Times = np.repeat(of_machines, machines.devices)
    for _ in range(steps):
        factor: Times = slow * _jittered(stragglers, generator, machines.world) if stragglers.jitter else slow
        yield Draw(factor, _paused(stragglers, generator, factor * seconds))


def _jittered(stragglers: Stragglers, generator: np.random.Generator, world: int) -> Times:
    """Factors of mean 1."""
    jitter = stragglers.jitter
    if stragglers.distribution == "exponential":
        return np.asarray((1 - jitter) + jitter * generator.standard_exponential(world))
    variance = np.log1p(jitter**2)  # of the logarithm, where that of the factor is jitter²
    return np.asarray(np.exp(np.sqrt(variance) * generator.standard_normal(world) - variance / 2))


def _paused(stragglers: Stragglers, generator: np.random.Generator, computed: Times) -> Times | float:
    """Seconds that workers stand still in a step in which they compute for so long."""
    pauses = stragglers.pauses
    return 0.0 if pauses is None else np.asarray(generator.poisson(computed / pauses.every) * pauses.seconds)
