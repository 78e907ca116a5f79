"""Shared by integrations: each rank's own part of a checkpoint beside the framework's file, and the average of all."""

import importlib
import shutil
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer import checkpoint
from gossamer.algorithms.base import Algorithm
from gossamer.distributed_data_parallel import DistributedDataParallel

OWN = "gossamer-ranks"
"""The folder, or the ending of its name, in which ranks keep their own parts."""


class ReplicatingStrategy:
    """Mixin before a ``DDPStrategy`` of Lightning or Fabric: what it replicates models with.

    ``algorithm``, ``buffers``, ``overlap_forward``, ``ignore``: as for :func:`gossamer.replicate`; ``options``: the strategy's.
    """

    _ddp_kwargs: dict[str, Any]

    def __init__(
        self,
        algorithm: Algorithm | None = None,
        *,
        buffers: Any = None,
        overlap_forward: bool = False,
        ignore: Sequence[str | nn.Module] = (),
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._algorithm = algorithm
        self._replicate_options = {"buffers": buffers, "overlap_forward": overlap_forward, "ignore": ignore}

    def _wrap(
        self, module: nn.Module, optimizers: Sequence[Optimizer], device_ids: list[int] | None, precision: Any
    ) -> DistributedDataParallel:
        """The module in DDP's form. ``precision``: the plugin, which may have a ``GradScaler``."""
        return DistributedDataParallel(
            module,
            optimizers,
            self._algorithm,
            device_ids=device_ids,
            scaler=getattr(precision, "scaler", None),
            **self._ddp_kwargs,
            **self._replicate_options,
        )


class Replicated:
    """A model in DDP's form with its optimizers, while a framework trains it: saved, resumed, averaged and closed."""

    def __init__(self, wrapped: DistributedDataParallel, optimizers: Sequence[Optimizer]) -> None:
        assert wrapped.replica is not None
        self.wrapped, self.replica = wrapped, wrapped.replica
        self._optimizers = list(optimizers)
        self._average: ExitStack | None = None
        self._open = True
        self._trained = self._all_trained()

    def _all_trained(self) -> tuple[list[bool], list[int]]:
        held = [id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]]
        return [p.requires_grad for p in self.wrapped.module.parameters()], held

    def trains_others(self) -> bool:
        """Whether parameters have been frozen or unfrozen since, or optimizers have been given others."""
        return self._all_trained() != self._trained

    def _parts(self) -> dict[str, Any]:
        """What each rank saves for itself."""
        optimizers = {f"optimizer{number}": each for number, each in enumerate(self._optimizers)}
        return {"model": self.wrapped.module, "replica": self.replica, **optimizers}

    def save(self, folder: str | Path) -> None:
        """Each rank's weights, what its optimizers remember, and the algorithm's state. Collective."""
        if self._open and is_local(folder):
            with self.own_weights():
                checkpoint.save(folder, self.replica.step, keep=1, **self._parts())

    def load(self, folder: str | Path) -> bool:
        """Put them back; whether there were any. Collective."""
        return is_local(folder) and checkpoint.load(folder, **self._parts()) is not None

    def enter_average(self) -> None:
        """The model holds the average of all replicas, until :meth:`leave_average`. Collective."""
        if self._open and self._average is None:
            self._average = ExitStack()
            self._average.enter_context(self.replica.consensus())

    def leave_average(self) -> None:
        """The model holds this rank's own weights."""
        average, self._average = self._average, None
        if average is not None:
            average.close()

    @contextmanager
    def average(self) -> Iterator[None]:
        """Inside, the model holds the average of all replicas; also where it does already. Collective."""
        outermost = self._average is None
        self.enter_average()
        try:
            yield
        finally:
            if outermost:
                self.leave_average()

    @contextmanager
    def own_weights(self) -> Iterator[None]:
        """Inside, the model holds this rank's own weights. Collective."""
        inside = self._average is not None
        self.leave_average()
        try:
            yield
        finally:
            if inside:
                self.enter_average()

    def close(self, average: bool) -> None:
        """The model is the average of all replicas, or (after an error) this rank's own."""
        self.leave_average()
        if self._open:
            self._open = False
            self.replica.close(average=average)


def is_local(folder: str | Path) -> bool:
    """Whether it is a folder of a file system; a warning says so if not."""
    if "://" in str(folder):
        warnings.warn(
            f"{folder} is no folder of this machine, so that each rank's own part of the checkpoint is left out: a resumed run "
            "begins with the average of the replicas, and forgets unsent gradients",
            stacklevel=3,
        )
        return False
    return True


def remove(folder: str | Path) -> None:
    """Remove what ranks kept of a checkpoint."""
    shutil.rmtree(folder, ignore_errors=True)


def beside(path: str | Path) -> str:
    """The folder of the ranks' own parts of a checkpoint that is a file."""
    return f"{path}.{OWN}"


def first_of(names: Sequence[str], why: str) -> Any:
    """The module that is imported already, or else the first one that is installed: a library may have two names."""
    imported = next((name for name in names if name.partition(".")[0] in sys.modules), None)
    chosen = imported or next((name for name in names if find_spec(name.partition(".")[0]) is not None), None)
    if chosen is None:
        needed = " or ".join(name.partition(".")[0] for name in names)
        raise ImportError(f"{why} needs {needed}: pip install 'gossamer[integrations]'")
    return importlib.import_module(chosen)


def raw(optimizers: Sequence[Any]) -> list[Optimizer]:
    """The optimizers inside of a framework's wrappers."""
    return [getattr(each, "optimizer", getattr(each, "_optimizer", each)) for each in optimizers]
