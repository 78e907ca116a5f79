"""At the step: gradients that several backward passes have accumulated are exchanged when an optimizer's step begins."""

from collections.abc import Sequence

from torch.optim import Optimizer

from gossamer.engine.checks import held_by
from gossamer.engine.loop import Loop, Subscriber
from gossamer.errors import UsageError


class AtStep(Subscriber):
    """Exchanges them, once for each step. A pipeline's micro-batches are such passes, and nothing tells which is the last."""

    def __init__(self, rank: int, loop: Loop, optimizers: Sequence[Optimizer]) -> None:
        self._rank, self._loop, self._optimizers = rank, loop, optimizers

    def before_step(self, index: int, closure: bool) -> None:
        if closure:
            raise UsageError(
                f"rank {self._rank}: optimizer.step(closure) computes gradients inside the step, and synchronize='step' "
                "exchanges them when it begins: call the closure before, and step() without it"
            )
        if self._loop.ended_apart or (not self._loop.had_pass(index) and self._written(index)):
            self._loop.pass_without_gradients()

    def _written(self, index: int) -> bool:
        """Whether there are gradients that no hook has told of: some pipelines write those of weights themselves."""
        return any(parameter.grad is not None for parameter in held_by(self._optimizers[index]))
