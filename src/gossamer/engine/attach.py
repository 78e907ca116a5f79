"""Attach: what a replica runs with its optimizers, and what is taken out of them for that."""

from collections.abc import Sequence

from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.optim.momentum import lend_momentum, return_momentum


def attach(algorithm: Algorithm, optimizers: Sequence[Optimizer]) -> Algorithm:
    """The algorithm for the parameters of these optimizers, whose momentum goes to it if it takes that.

    Raises:
        ConfigurationError: these parameters, or this optimizer, are not for this algorithm.
    """
    momentum = lend_momentum(optimizers) if algorithm.traits.takes_momentum else 0.0
    return algorithm.attach([p for o in optimizers for group in o.param_groups for p in group["params"]], momentum)


def detach(algorithm: Algorithm, optimizers: Sequence[Optimizer]) -> None:
    """Give back what :func:`attach` took."""
    if algorithm.traits.takes_momentum:
        return_momentum(optimizers)
