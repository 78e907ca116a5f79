"""Workload: a model and its batches, taken from a Python file that a user can write for a model of their own."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.errors import ConfigurationError

_FUNCTIONS = ("build_model", "build_optimizer", "random_batch", "loss")


@dataclass(frozen=True)
class Workload:
    """What a benchmark needs of a training script.

    ``build_model()`` gives the module; ``build_optimizer(model)`` its optimizer; ``random_batch(generator)`` inputs and
    targets of one worker's batch; ``loss(outputs, targets)`` a scalar. For convergence, optionally:
    ``training_batches(rank, world, seed)`` yields a worker's batches without end; ``quality(model)`` gives an
    ``"accuracy"`` or a ``"loss"`` on held-out data.
    """

    name: str
    build_model: Callable[[], nn.Module]
    build_optimizer: Callable[[nn.Module], Optimizer]
    random_batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor]
    training_batches: Callable[[int, int, int], Iterator[tuple[Tensor, Tensor]]] | None = None
    quality: Callable[[nn.Module], dict[str, float]] | None = None


def load_workload(path: Path) -> Workload:
    """The workload that a Python file defines by the four functions. Raises ConfigurationError if one is missing."""
    if not path.is_file():
        raise ConfigurationError(f"there is no workload file {path}")
    spec = importlib.util.spec_from_file_location(f"workload_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # As when Python runs the file itself, what lies beside it can be imported.
    if str(path.parent.resolve()) not in sys.path:
        sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    missing = [name for name in _FUNCTIONS if not callable(getattr(module, name, None))]
    if missing:
        raise ConfigurationError(f"{path} defines no {', '.join(missing)}(); a workload needs {', '.join(_FUNCTIONS)}")
    optional: dict[str, Any] = {name: getattr(module, name, None) for name in ("training_batches", "quality")}
    return Workload(path.stem.lstrip("0123456789_"), **{name: getattr(module, name) for name in _FUNCTIONS}, **optional)
