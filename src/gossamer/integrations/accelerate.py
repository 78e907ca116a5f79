"""Accelerate: an ``Accelerator`` that replicates models with a gossamer algorithm, and leaves DDP off.

::

    from gossamer.integrations.accelerate import Accelerator

    accelerator = Accelerator(algorithm=gossamer.Gossip())
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.distributed_data_parallel import DistributedDataParallel
from gossamer.errors import ConfigurationError
from gossamer.integrations._shared import OWN, Replicated, first_of
from gossamer.replica import Replica

__all__ = ["Accelerator", "use"]

_Base: Any = first_of(("accelerate",), "gossamer.integrations.accelerate").Accelerator


class Accelerator(_Base):  # type: ignore[misc]
    """Accelerate's, with a gossamer algorithm in place of DDP's exchange.

    ``prepare(model, optimizer, …)`` takes a model together with its optimizers. ``accumulate()``, ``no_sync()``, clipping,
    mixed precision and gathering are Accelerate's. ``save_state()`` writes the average of all replicas, and in the folder
    ``gossamer-ranks`` each rank's own part, which ``load_state()`` puts back on as many ranks.

    Args:
        algorithm: the relaxation; exact :class:`gossamer.AllReduce` by default.
        replicate: further arguments of :func:`gossamer.replicate` (``buffers``, ``overlap_forward``, ``ignore``, ``timeout``).
        options: Accelerate's own.
    """

    def __init__(
        self, *, algorithm: Algorithm | None = None, replicate: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        use(self, algorithm, **(replicate or {}))

    @property
    def replicas(self) -> list[Replica]:
        """The handles, in the order in which models were prepared."""
        return [each.replica for each in self._replicated]

    def prepare_model(self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False) -> Any:
        """Accelerate's preparation without DDP."""
        kind = str(self.distributed_type).rpartition(".")[2]
        if kind != "NO" and not kind.startswith("MULTI_"):
            raise ConfigurationError(f"gossamer takes the place of DDP, and this Accelerator is set up for {kind}")
        return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """Prepare, and replicate every model that comes together with its optimizers."""
        prepared = super().prepare(*args, **kwargs)
        several = list(prepared) if isinstance(prepared, tuple) else [prepared]
        optimizers = [each for each in args if isinstance(each, Optimizer)]
        for place, (before, after) in enumerate(zip(args, several, strict=True)):
            if isinstance(before, nn.Module) and not isinstance(after, DistributedDataParallel):
                several[place] = self._replicate(after, optimizers)
        self._require_replicated(optimizers)
        return tuple(several) if isinstance(prepared, tuple) else several[0]

    def _replicate(self, model: nn.Module, optimizers: list[Any]) -> nn.Module:
        """The model in DDP's form, if any of the optimizers is its own."""
        ids = set(map(id, model.parameters()))
        inner = [getattr(each, "optimizer", each) for each in optimizers]
        own = [each for each in inner if any(id(p) in ids for group in each.param_groups for p in group["params"])]
        if not own:
            return model
        devices = None if self.device.type == "cpu" else [self.device]
        wrapped = DistributedDataParallel(
            model, own, self.algorithm, device_ids=devices, scaler=self.scaler, **self._replicate_options
        )
        wrapped._is_accelerate_prepared = True  # type: ignore[assignment]
        self._models[:] = [wrapped if each is model else each for each in self._models]
        self._replicated.append(Replicated(wrapped, own))
        return wrapped

    def _require_replicated(self, optimizers: list[Any]) -> None:
        """Raise where an optimizer comes after its model, which then would be trained alone."""
        alone = [each for each in self._models if not isinstance(each, DistributedDataParallel)]
        ids = {id(p) for model in alone for p in model.parameters()}
        for optimizer in (getattr(each, "optimizer", each) for each in optimizers):
            if any(id(p) in ids for group in optimizer.param_groups for p in group["params"]):
                raise ConfigurationError(
                    "the model was prepared without its optimizer, and so is not replicated: prepare both in one call, "
                    "accelerator.prepare(model, optimizer)"
                )

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        """Inside, the backward pass of a forward pass that ran under ``no_sync()`` is synchronised."""
        if isinstance(model, DistributedDataParallel):
            model.synchronize_next_backward()
        yield

    @contextmanager
    def average(self) -> Iterator[None]:
        """Inside, the models hold the average of all replicas: for an evaluation. Collective."""
        with ExitStack() as stack:
            for each in self._replicated:
                stack.enter_context(each.average())
            yield

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's files with the average of all replicas, and each rank's own part beside them. Collective."""
        with self.average():
            place = super().save_state(output_dir, *args, **kwargs)
        for number, each in enumerate(self._replicated):
            each.save(Path(place) / OWN / str(number))
        return place

    def load_state(self, input_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Accelerate's files, and this rank's own part where there is one. Collective."""
        places: list[Any] = []  # Accelerate finds the newest checkpoint itself where no folder is given
        noted = self.register_load_state_pre_hook(lambda models, place: places.append(place))
        try:
            found = super().load_state(input_dir, *args, **kwargs)
        finally:
            noted.remove()
        for number, each in enumerate(self._replicated):
            each.load(Path(places[0]) / OWN / str(number))
        return found

    def close(self, average: bool = True) -> None:
        """End the replicas: the models are the average of all, or this rank's own. Collective with ``average``."""
        for each in self._replicated:
            each.close(average)
            self._models[:] = [each.wrapped.module if model is each.wrapped else model for model in self._models]
        self._replicated.clear()

    def free_memory(self, *objects: Any) -> Any:
        """Accelerate's; the replicas end, so that models may be prepared anew, and keep this rank's own weights."""
        self.close(average=False)
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """End the replicas, the models being the average of all, and Accelerate's trackers. Collective."""
        self.close()
        super().end_training()


def use(accelerator: Any, algorithm: Algorithm | None = None, **replicate: Any) -> Accelerator:
    """Make an ``Accelerator`` that exists already one of gossamer's, before it prepares anything; returns it."""
    if not isinstance(accelerator, Accelerator):  # a class made of this one stays what it is
        accelerator.__class__ = Accelerator
    accelerator.algorithm, accelerator._replicate_options = algorithm, replicate
    accelerator._replicated = []
    found: Accelerator = accelerator
    return found
