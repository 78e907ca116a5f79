"""Named: what is trained, by the name that a user gives: a shipped model, a file with its functions, or a training script."""

import shlex
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.utils._pytree import tree_map

from gossamer.bench.catalogue import is_workload, load_workload
from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.integrations.script import first_step
from gossamer.simulate.counted import as_mean, count_step
from gossamer.simulate.models import MODELS
from gossamer.simulate.run import like
from gossamer.simulate.task import DTYPES, Task, length_of, on_meta, task_of


def find_task(model: str, batch: int | None, dtype: str) -> Task:
    """A shipped model, or that of a Python file. Raises ConfigurationError."""
    if dtype not in DTYPES:
        raise ConfigurationError(f"--dtype {dtype}: parameters may be {', '.join(DTYPES)}")
    if model in MODELS:
        known, size = MODELS[model], batch or MODELS[model].batch
        inputs = known.inputs(size)
        inputs = inputs.to(DTYPES[dtype]) if inputs.is_floating_point() else inputs
        return task_of(
            model, known.model(DTYPES[dtype]), inputs, as_mean, batch=size, samples=known.samples, optimizer=known.optimizer
        )
    file, *arguments = shlex.split(model) or [""]
    if not file.endswith(".py"):
        raise ConfigurationError(f"unknown model {model!r}: it may be a Python file, or one of {', '.join(MODELS)}")
    if batch is not None:
        raise ConfigurationError(f"{file} says itself what its batch is: leave --batch out")
    if arguments or not is_workload(Path(file)):
        return _of_script(Path(file), arguments)
    return _of_file(Path(file), DTYPES[dtype])


def _of_script(path: Path, arguments: Sequence[str]) -> Task:
    """What a training script with its own loop trains, in its own types."""
    step = first_step(path, arguments)
    try:
        counted = count_step(step.model, step.inputs, as_mean, step.named, step.passes)
    except Exception as error:
        raise ConfigurationError(f"{path}: {type(step.model).__name__} without values raises {error}") from error
    optimizer, batch = like(step.optimizer), step.passes * length_of((step.inputs, step.named))
    return Task(name=path.name, model=step.model, counted=counted, batch=batch, samples="samples", optimizer=optimizer)


def _of_file(path: Path, dtype: torch.dtype) -> Task:
    workload = load_workload(path)
    try:
        return _task_of(workload, path.name, dtype)
    except GossamerError:
        raise
    except Exception as error:
        raise ConfigurationError(
            f"{path}: a step of its model, on tensors without values, raises {type(error).__name__}: {error}"
        ) from error


def _task_of(workload: Workload, name: str, dtype: torch.dtype) -> Task:
    model = workload.build_model()
    optimizer = like(workload.build_optimizer(model))
    inputs, targets = tree_map(on_meta(dtype), workload.random_batch(torch.Generator().manual_seed(0)))

    return task_of(
        name, model.to("meta", dtype), inputs, lambda outputs: workload.loss(outputs, targets),
        batch=length_of(inputs), samples="samples", optimizer=optimizer,
    )  # fmt: skip
