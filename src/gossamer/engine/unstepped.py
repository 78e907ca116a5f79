"""Unstepped weights: a warning where another optimizer than the one that was given updates the weights."""

import logging
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.runner import Runner
from gossamer.engine.loop import Subscriber

_logger = logging.getLogger("gossamer")

_MANY = 20
"""Gradients of one parameter without a step, after which its version is looked at."""


class UnsteppedWeights(Subscriber):
    """Watches one weight where only weights are exchanged: without steps of the optimizer nothing would be, silently."""

    def __init__(self, runner: Runner, weight: Parameter) -> None:
        self._rank, self._weight = runner.rank, weight
        self._gradients, self._version = 0, 0

    def hook(self) -> Any:
        """Install the hook; returns its handle."""
        return self._weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, weight: Tensor) -> None:
        if self._gradients == 0:
            self._version = weight._version
        self._gradients += 1
        if self._gradients == _MANY and weight._version != self._version:
            _logger.warning(
                "rank %d: the weights have changed during %d backward passes, but the optimizer given to replicate() took "
                "no step, so nothing was exchanged; give it the optimizer whose step() is called", self._rank, _MANY
            )  # fmt: skip

    def before_step(self, index: int, closure: bool) -> None:
        self._gradients = 0
