"""At the step: gradients that several backward passes have accumulated are exchanged when an optimizer's step begins."""

from gossamer.engine.loop import Loop, Subscriber
from gossamer.errors import UsageError


class AtStep(Subscriber):
    """Exchanges them, once for each step. A pipeline's micro-batches are such passes; where their number was given, the last
    one has exchanged them.

    Also where this rank has none: an expert to which nothing was routed here has gradients elsewhere, and some pipelines write
    gradients without calling hooks.
    """

    def __init__(self, rank: int, loop: Loop) -> None:
        self._rank, self._loop = rank, loop

    def before_step(self, index: int, closure: bool) -> None:
        if closure:
            raise UsageError(
                f"rank {self._rank}: optimizer.step(closure) computes gradients inside the step, and synchronize= "
                "exchanges them when it begins: call the closure before, and step() without it"
            )
        if self._loop.ended_apart or not self._loop.had_pass(index):
            self._loop.pass_without_gradients()
