"""Transformers: a ``Trainer`` that replicates its model with a gossamer algorithm, and leaves DDP off.

::

    from gossamer.integrations.transformers import GossamerTrainer

    trainer = GossamerTrainer(model, args, train_dataset=data, algorithm=gossamer.Gossip())

Other trainers take it as a mixin: ``class Mine(Replicating, SFTTrainer): ...``.
"""

from pathlib import Path
from typing import Any

from gossamer.algorithms.base import Algorithm
from gossamer.integrations import accelerate
from gossamer.integrations._shared import OWN, Replicated, first_of
from gossamer.replica import Replica

__all__ = ["GossamerTrainer", "Replicating"]

_Base: Any = first_of(("transformers",), "GossamerTrainer").Trainer


class Replicating:
    """Mixin before a ``transformers.Trainer``: a gossamer algorithm in place of DDP's exchange.

    Accumulation, clipping and precision are Trainer's. Evaluation runs on the average of all replicas, which is also what a
    checkpoint holds; in its folder ``gossamer-ranks`` each rank keeps its own weights, optimizer and the algorithm's state,
    with which ``train(resume_from_checkpoint=…)`` goes on on as many ranks. After ``train()`` the model is the average.

    Args:
        algorithm: the relaxation; exact :class:`gossamer.AllReduce` by default.
        replicate: further arguments of :func:`gossamer.replicate`, in a dictionary.
    """

    def __init__(self, *args: Any, algorithm: Algorithm | None = None, replicate: Any = None, **kwargs: Any) -> None:
        self._algorithm, self._replicate_options = algorithm, dict(replicate or {})
        super().__init__(*args, **kwargs)

    @property
    def replica(self) -> Replica | None:
        """The handle, during ``train()``."""
        return None if self._replicated is None else self._replicated.replica

    @property
    def _replicated(self) -> Replicated | None:
        found: list[Replicated] = self.accelerator._replicated
        return found[-1] if found else None

    accelerator: Any
    """Set by the trainer."""

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator one that replicates."""
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerate.use(self.accelerator, self._algorithm, **self._replicate_options)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; then the model is the average of all replicas."""
        try:
            found = super().train(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._end(average=False)
            raise
        self._end(average=True)
        return found

    def _end(self, average: bool) -> None:
        self.accelerator.close(average)
        self.model_wrapped = self.model  # type: ignore[attr-defined]

    def _load_best_model(self) -> None:
        self._end(average=False)  # the best one takes its place, on every rank
        super()._load_best_model()  # type: ignore[misc]

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the average of all replicas."""
        with self.accelerator.average():
            return super().evaluation_loop(*args, **kwargs)  # type: ignore[misc]

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        with self.accelerator.average():
            super()._save_checkpoint(*args, **kwargs)  # type: ignore[misc]
        if self._replicated is not None and not self.args.save_only_model:  # type: ignore[attr-defined]
            folder = Path(self._get_output_dir(trial=None)) / f"checkpoint-{self.state.global_step}"  # type: ignore[attr-defined]
            self._replicated.save(folder / OWN)

    def _load_optimizer_and_scheduler(self, checkpoint: Any) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)  # type: ignore[misc]
        if checkpoint is not None and self._replicated is not None:
            self._replicated.load(Path(checkpoint) / OWN)


class GossamerTrainer(Replicating, _Base):  # type: ignore[misc]
    """``transformers.Trainer`` with a gossamer algorithm in place of DDP's exchange: see :class:`Replicating`."""
