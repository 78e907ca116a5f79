"""Workload: a model and its batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


@dataclass(frozen=True)
class Workload:
    """What a benchmark needs of a training script.

    ``build_model()`` gives the module; ``build_optimizer(model)`` its optimizer; ``random_batch(generator)`` inputs and
    targets of one worker's batch; ``loss(outputs, targets)`` a scalar. For convergence, optionally:
    ``training_batches(rank, world, seed)`` yields a worker's batches without end; ``quality(model)`` gives an
    ``"accuracy"`` or a ``"loss"`` on held-out data, by itself: it is called on one rank; ``training_samples()`` all inputs
    and labels.
    """

    name: str
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], Optimizer]
    random_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    training_batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]] | None = None
    quality: Callable[[nn.Module], dict[str, float]] | None = None
    training_samples: Callable[[], tuple[Tensor, Tensor]] | None = None
