"""Unaveraged gradients: optimizers that correct for the noise of gradients are told how many workers average them."""

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.base import Context, unaveraged
from gossamer.comm.runner import Runner
from gossamer.engine.gradients import GradientSync
from gossamer.engine.loop import Subscriber
from gossamer.engine.weight_syncs import WeightSyncs
from gossamer.optim.gossip_adamw import AVERAGED_OVER, tell_how_many


class UnaveragedGradients(Subscriber):
    """Tells each optimizer before its step of how many gradients, not averaged with each other, the mean update is made."""

    def __init__(
        self,
        runner: Runner,
        weights: WeightSyncs,
        gradients: GradientSync | None,
        optimizers: Sequence[Optimizer],
        parameters: Iterable[Tensor],
    ) -> None:
        """``parameters``: the replica's."""
        self._runner, self._weights, self._gradients, self._optimizers = runner, weights, gradients, optimizers
        self._own = frozenset(map(id, parameters))

    def before_step(self, index: int, closure: bool) -> None:
        def workers() -> int:
            step = self._weights[index].steps if self._gradients is None else self._gradients.step - 1
            ctx = Context(step, self._runner.rank, self._runner.members, self._runner.nodes)
            return unaveraged(self._weights[index].exchange.handlers if self._weights else [], ctx)

        tell_how_many(self._optimizers[index], workers, self._own)


def ask_how_many(optimizers: Sequence[Optimizer]) -> bool:
    """Whether any optimizer wants to know."""
    return any(AVERAGED_OVER in group for optimizer in optimizers for group in optimizer.param_groups)
