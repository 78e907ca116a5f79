"""Lightning: a strategy for ``Trainer`` (of ``lightning.pytorch`` or ``pytorch_lightning``).

::

    from gossamer.integrations.lightning import GossamerStrategy

    trainer = L.Trainer(strategy=GossamerStrategy(algorithm=gossamer.Gossip()), devices=8)
"""

from collections.abc import Callable, Mapping
from typing import Any

from gossamer.algorithms.base import Algorithm
from gossamer.integrations._shared import Replicated, ReplicatingStrategy, beside, first_of, raw, remove
from gossamer.replica import Replica

__all__ = ["GossamerStrategy"]

_Base: Any = first_of(("lightning.pytorch.strategies.ddp", "pytorch_lightning.strategies.ddp"), "GossamerStrategy").DDPStrategy


class GossamerStrategy(ReplicatingStrategy, _Base):  # type: ignore[misc]
    """Lightning's ``DDPStrategy`` with a gossamer algorithm in place of DDP's exchange.

    Accumulation, clipping, precision and manual optimization are Lightning's. Validation runs on the average of all replicas,
    which is also what a checkpoint holds; beside it, in a folder of the checkpoint's name with ``.gossamer-ranks``, each
    rank keeps its own weights, optimizers and the algorithm's state, with which ``fit(ckpt_path=…)`` resumes bit for bit on as
    many ranks. After ``fit()`` the module is the average.

    Args:
        algorithm: the relaxation; exact :class:`gossamer.AllReduce` by default.
        buffers, overlap_forward, ignore: as for :func:`gossamer.replicate`.
        options: of Lightning's ``DDPStrategy`` (``process_group_backend``, ``timeout``, ``start_method`` …).
    """

    def __init__(self, algorithm: Algorithm | None = None, **options: Any) -> None:
        super().__init__(algorithm, **options)
        self._replicated: Replicated | None = None
        self._failed = False
        self._resumed_from: str | None = None

    @property
    def replica(self) -> Replica | None:
        """The handle, during ``fit()``."""
        return None if self._replicated is None else self._replicated.replica

    def configure_ddp(self) -> None:
        """The model is wrapped when its optimizers are there: see :meth:`setup`."""

    def setup(self, trainer: Any) -> None:
        """Set up as Lightning does, then replicate."""
        super().setup(trainer)
        if trainer.state.fn == "fit":
            self._failed = False
            self._replicate()

    def _replicate(self) -> None:
        optimizers = raw(self.optimizers)
        wrapped = self._wrap(self.lightning_module, optimizers, self.determine_ddp_device_ids(), self.precision_plugin)
        self.model: Any = wrapped
        self._replicated = Replicated(wrapped, optimizers)

    def on_train_batch_start(self, batch: Any, batch_idx: int, *others: Any) -> None:
        """Replicate again, from the average, where a callback has unfrozen parameters and given them to an optimizer."""
        super().on_train_batch_start(batch, batch_idx, *others)
        if self._replicated is not None and self._replicated.trains_others():
            self._replicated.close(average=True)
            self._replicate()

    def pre_backward(self, closure_loss: Any) -> None:
        """There is no reducer to prepare."""

    def post_backward(self, closure_loss: Any) -> None:
        """There is no reducer to prepare."""

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any) -> Any:
        """Take a step after forward and backward, which Lightning would run inside of it: exchanges of weights travel beside
        them, and end just before the update."""
        plugin = self.precision_plugin
        if self._replicated is None or getattr(plugin, "scaler", None) is not None:
            return super().optimizer_step(optimizer, closure, model, **kwargs)
        result = plugin._wrap_closure(model or self.lightning_module, optimizer, closure)
        raw([optimizer])[0].step(**kwargs)
        return result

    # -- evaluation ---------------------------------------------------------------------------------------------------

    def on_validation_start(self) -> None:
        """Validate the average of all replicas."""
        super().on_validation_start()
        if self._replicated is not None:
            self._replicated.enter_average()

    def on_validation_end(self) -> None:
        """Go on with this rank's own weights."""
        if self._replicated is not None:
            self._replicated.leave_average()
        super().on_validation_end()

    # -- checkpoints --------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The average of all replicas. Collective, as Lightning calls it."""
        if self._replicated is None:
            return dict(super().lightning_module_state_dict())
        with self._replicated.average():
            return {
                name: value.clone() if hasattr(value, "clone") else value
                for name, value in super().lightning_module_state_dict().items()
            }

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Lightning's file, and each rank's own part beside it."""
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self._replicated is not None and "optimizer_states" in checkpoint:
            self._replicated.save(beside(filepath))

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's file and the ranks' parts."""
        super().remove_checkpoint(filepath)
        if self.local_rank == 0:
            remove(beside(filepath))

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's file; :meth:`load_optimizer_state_dict` reads this rank's part."""
        self._resumed_from = str(checkpoint_path)
        return dict(super().load_checkpoint(checkpoint_path, *args, **kwargs))

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """The optimizers' state, and this rank's own where there is one."""
        super().load_optimizer_state_dict(checkpoint)
        if self._replicated is not None and self._resumed_from is not None:
            self._replicated.load(beside(self._resumed_from))

    # -- the end ------------------------------------------------------------------------------------------------------

    def on_exception(self, exception: BaseException) -> None:
        """An average is not made: others may not come."""
        self._failed = True
        super().on_exception(exception)

    def teardown(self) -> None:
        """Leave the average of all replicas in the module."""
        replicated, self._replicated = self._replicated, None
        if replicated is not None:
            replicated.close(average=not self._failed)
        super().teardown()
