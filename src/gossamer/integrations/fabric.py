"""Fabric: a strategy for ``Fabric`` (of ``lightning.fabric`` or ``lightning_fabric``).

::

    from gossamer.integrations.fabric import GossamerStrategy

    fabric = L.Fabric(strategy=GossamerStrategy(algorithm=gossamer.Gossip()), devices=8)
    model, optimizer = fabric.setup(model, optimizer)
"""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.errors import ConfigurationError
from gossamer.integrations._shared import Replicated, ReplicatingStrategy, beside, first_of

__all__ = ["GossamerStrategy"]

_Base: Any = first_of(("lightning.fabric.strategies.ddp", "lightning_fabric.strategies.ddp"), "GossamerStrategy").DDPStrategy


class GossamerStrategy(ReplicatingStrategy, _Base):  # type: ignore[misc]
    """Fabric's ``DDPStrategy`` with a gossamer algorithm in place of DDP's exchange.

    ``fabric.setup(model, optimizer)`` replicates; the handle is ``strategy.replicas[0]``, for ``consensus()`` around an
    evaluation and ``close(average=True)`` at the end. ``fabric.no_backward_sync`` accumulates. ``fabric.save`` writes the
    average of all replicas, and beside it each rank's own part, which ``fabric.load`` puts back on as many ranks.

    Args:
        algorithm: the relaxation; exact :class:`gossamer.AllReduce` by default.
        buffers, overlap_forward, ignore: as for :func:`gossamer.replicate`.
        options: of Fabric's ``DDPStrategy``.
    """

    def __init__(self, algorithm: Algorithm | None = None, **options: Any) -> None:
        super().__init__(algorithm, **options)
        self._replicated: list[Replicated] = []

    @property
    def replicas(self) -> list[Any]:
        """The handles, in the order of ``fabric.setup``."""
        return [each.replica for each in self._replicated]

    def setup_module(self, module: nn.Module) -> nn.Module:
        """A model without an optimizer is not trained, and stays as it is."""
        if any(parameter.requires_grad for parameter in module.parameters()):
            raise ConfigurationError(
                "GossamerStrategy replicates a model together with its optimizers: fabric.setup(model, optimizer), and not "
                "fabric.setup_module(model); freeze what is not to be trained (requires_grad_(False))"
            )
        return module

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], *others: Any, **more: Any) -> Any:
        """Replicate them."""
        wrapped = self._wrap(module, optimizers, self._determine_ddp_device_ids(), self.precision)
        self._replicated.append(Replicated(wrapped, optimizers))
        return (wrapped, optimizers, *others, *more.values())

    def save_checkpoint(self, path: Any, state: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        """Fabric's file with the average of all replicas, and each rank's own part beside it. Collective."""
        saved = [each for each in self._replicated if any(each.wrapped is value for value in state.values())]
        with ExitStack() as stack:
            for each in saved:
                stack.enter_context(each.average())
            super().save_checkpoint(path, state, *args, **kwargs)
        for number, each in enumerate(saved):
            each.save(Path(beside(path)) / str(number))

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Fabric's file, and this rank's own part where there is one. Collective."""
        values = list(state.values()) if isinstance(state, dict) else [state]
        left = dict(super().load_checkpoint(path, state, *args, **kwargs))
        loaded = [each for each in self._replicated if any(each.wrapped is value for value in values)]
        for number, each in enumerate(loaded):
            each.load(Path(beside(path)) / str(number))
        return left
