"""Loss scaling: all ranks skip a step together, and residuals follow the scale."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.comm.ops import maximum
from gossamer.comm.runner import Runner
from gossamer.engine.exchange import Exchange
from gossamer.engine.finite import any_non_finite
from gossamer.engine.loop import Loop, Subscriber
from gossamer.engine.sharding import local
from gossamer.errors import UsageError
from gossamer.memory import as_real


def agree_on_overflow(runner: Runner, scaler: Any, owners: Sequence[Iterable[Parameter]]) -> None:
    """If any rank has a non-finite gradient, write inf into every rank's gradients, so that every GradScaler skips.

    ``owners``: the parameters of each optimizer. It is agreed for each of them, as the scaler skips for each: gradients that
    one has left from its own turn do not make another one skip.
    """
    if scaler is None or not scaler.is_enabled() or runner.world == 1:
        return
    gradients = [[_values(p.grad) for p in parameters if p.grad is not None] for parameters in owners]
    found = torch.cat(list(map(any_non_finite, gradients)))
    overflow = runner.run(lambda: maximum(found, runner.world), "the agreement on overflow")
    for of_one, broken in zip(gradients, overflow.tolist(), strict=True):
        if broken > 0 and of_one:
            torch._foreach_add_(of_one, float("inf"))


def _values(gradient: Tensor) -> Tensor:
    """What a gradient consists of: real numbers; of a sparse one its values, which may be several for one place."""
    gradient = local(gradient)
    return as_real(gradient.detach()._values() if gradient.is_sparse else gradient.detach())


class LossScale(Subscriber):
    """By what the loss is scaled. Residuals are in the units of the gradients, which change with the scale.

    ``owners``: the parameters of each optimizer. ``exchange``: that of the gradients, if they are exchanged.
    """

    def __init__(
        self,
        runner: Runner,
        loop: Loop,
        scaler: Any,
        owners: Sequence[Iterable[Parameter]],
        exchange: Exchange | None,
        weights_travel: bool,
    ) -> None:
        self._runner, self._loop, self._scaler, self._owners = runner, loop, scaler, owners
        self._exchange, self._weights_travel = exchange, weights_travel
        self._last: Tensor | None = None
        """In the last backward pass; where the scaler has it."""

    def begin_backward(self) -> None:
        if self._exchange is not None:
            self.follow(self._exchange.states.rescale if self._exchange.states.remembers else None)

    def end_backward(self) -> None:
        agree_on_overflow(self._runner, self._scaler, self._owners)

    def before_step(self, index: int, closure: bool) -> None:
        """Where weights travel, it is the agreement on overflow that needs the end of a synchronised pass."""
        if not self._weights_travel or closure or not self.on or self._runner.world == 1:
            return
        reason = "at its end the ranks agree on whether to skip the step (scaler=); the last pass before a step must be outside"
        if not self._loop.had_pass(index):
            raise self._error(
                "no backward pass outside of no_sync() has reached a parameter of the model since the last one", reason
            )
        if self._loop.ended_apart:
            raise self._error("a backward pass inside no_sync() came after the last one outside of it", reason)

    def _error(self, what: str, reason: str) -> UsageError:
        return UsageError(
            f"rank {self._runner.rank}: optimizer.step() at step {self._loop.synchronised_passes}, but {what}; {reason}"
        )

    @property
    def on(self) -> bool:
        """Whether it is scaled at all."""
        return self._scaler is not None and bool(self._scaler.is_enabled())

    def follow(self, rescale: Callable[[Tensor], None] | None) -> None:
        """A backward pass begins: ``rescale`` residuals (if there are any) by what gradients have grown by, ``float32[]``."""
        if not self.on:
            return
        before, self._last = self._last, scale_of(self._scaler)
        if before is not None and rescale is not None:
            before = before.to(self._last.device)
            known = (before > 0) & (self._last > 0)
            rescale(torch.where(known, self._last / before, 1.0))

    def saved(self) -> float:
        """For a state: the scale of the residuals; 1 if it is not scaled."""
        return 1.0 if self._last is None else float(self._last)

    def load(self, saved: float | None) -> None:
        """Residuals that were loaded are in units of the scale that they were ``saved`` with (None: it is not known)."""
        self._last = torch.tensor(saved) if saved is not None and self.on else None
        if saved is not None and not self.on and self._exchange is not None:
            self._exchange.states.rescale(torch.tensor(1 / saved))


def scale_of(scaler: Any) -> Tensor:
    """The scale, ``float32[]``, where the scaler has it: to read it on a device the host would have to wait."""
    ask = getattr(scaler, "_get_scale_async", None)
    there = None if ask is None else ask()
    return torch.tensor(float(scaler.get_scale())) if there is None else there.detach().clone().reshape(())
