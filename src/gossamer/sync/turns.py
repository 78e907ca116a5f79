"""Turns: a backward pass, then a step of each optimizer. What cannot be meant is refused."""

import logging

from torch import Tensor

from gossamer.comm.runner import Runner
from gossamer.errors import UsageError
from gossamer.sync.backward import Backward
from gossamer.sync.scaling import LossScale

logger = logging.getLogger("gossamer")


class Turns:
    """Which backward passes each of several optimizers has taken steps for.

    ``weight``: any of the weights, where it is these that travel. Then a pass inside ``no_sync()`` is one to take a step for,
    unless the loss is scaled: only at the end of a synchronised one all agree on whether to skip the step.
    """

    def __init__(
        self, runner: Runner, backward: Backward, optimizers: int, weight: Tensor | None, loss_scale: LossScale
    ) -> None:
        self._runner, self._backward, self._weight, self._loss_scale = runner, backward, weight, loss_scale
        self._seen = [(0, 0)] * optimizers
        """Of each optimizer's last step: how many passes there had been, and how many synchronised ones."""
        self._version = -1 if weight is None else weight._version
        """Of the weight, in the first pass after the last step."""
        self._apart = 0
        """How many passes inside ``no_sync()`` there were before the last one outside."""
        self.accumulated = False
        """Whether any of them came after the one outside before that."""

    def note_step(self, index: int) -> None:
        """An optimizer has taken its step."""
        self._seen[index] = (self._backward.passes, self._backward.synchronised_passes)

    def require_backward(self, index: int, step: int) -> None:
        """Raise if an optimizer is about to take a step, and there is no backward pass to take it for."""
        if self._runner.world == 1:
            return
        passes, synchronised = self._seen[index]
        weights_travel, apart = self._weight is not None, self._backward.passes - self._backward.synchronised_passes
        alone_counts = weights_travel and not self._loss_scale.on
        if self._backward.synchronised_passes == synchronised and not (alone_counts and self._backward.passes != passes):
            raise self._error(
                step,
                f"no backward pass{' outside of no_sync()' if apart else ''} has reached a parameter of the model since "
                "the last one; the other ranks wait for this one's gradients",
            )
        if weights_travel and self._loss_scale.on and apart != self._apart:
            raise self._error(
                step,
                "a backward pass inside no_sync() came after the last one outside of it, at whose end the ranks agreed "
                "on whether to skip the step (scaler=); the last pass before a step must be outside",
            )

    def _error(self, step: int, why: str) -> UsageError:
        return UsageError(f"rank {self._runner.rank}: optimizer.step() at step {step}, but {why}")

    @property
    def waiting(self) -> list[int]:
        """The numbers of the optimizers that have taken no step since the last synchronised pass."""
        last = self._backward.synchronised_passes
        return [index for index, (_, synchronised) in enumerate(self._seen) if last > synchronised]

    def begin_backward(self) -> None:
        """A synchronised pass begins."""
        apart = self._backward.passes - self._backward.synchronised_passes
        self.accumulated, self._apart = apart != self._apart, apart
        waiting = self._backward.passes - max(passes for passes, _ in self._seen)
        if self._weight is not None and waiting == 0:
            self._version = self._weight._version
        if self._weight is not None and waiting == _MANY and self._weight._version != self._version:
            logger.warning(
                "rank %d: the weights have changed during %d backward passes, but the optimizer given to replicate() took "
                "no step, so nothing was exchanged; give it the optimizer whose step() is called", self._runner.rank, waiting
            )  # fmt: skip


_MANY = 20
"""Backward passes without a step after which it is asked whether somebody else takes them."""
