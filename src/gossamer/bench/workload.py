"""Workload: a model and its batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

Batches = Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]]
"""``(rank, world, seed)`` → a worker's batches without end."""

Quality = Callable[[nn.Module], dict[str, float]]


def usual_optimizer(model: nn.Module) -> Optimizer:
    """SGD with momentum, at a rate at which hardly anything diverges."""
    return torch.optim.SGD((p for p in model.parameters() if p.requires_grad), lr=1e-3, momentum=0.9)


def usual_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy where targets are classes (integers; outputs have one value per class last), the mean square otherwise."""
    if targets.is_floating_point():
        return F.mse_loss(outputs, targets)
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


@dataclass(frozen=True)
class Workload:
    """What a benchmark needs of a training script.

    ``build_model()`` gives the module; ``build_optimizer(model)`` its optimizer; ``random_batch(generator)`` inputs and
    targets of one worker's batch; ``loss(outputs, targets)`` a scalar. A file may leave out the second and the last: see
    :func:`usual_optimizer` and :func:`usual_loss`. For convergence, optionally:
    ``training_batches(rank, world, seed)`` yields a worker's batches without end; ``quality(model)`` gives an
    ``"accuracy"`` or a ``"loss"`` on held-out data, by itself: it is called on one rank, with the model in evaluation mode;
    ``training_samples()`` all inputs and labels.
    """

    name: str
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], Optimizer]
    random_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    training_batches: Batches | None = None
    quality: Quality | None = None
    training_samples: Callable[[], tuple[Tensor, Tensor]] | None = None
