"""EagerDiLoCo: outer steps with a worker's own new delta and the others' deltas of the period before."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks import outer
from gossamer.algorithms.blocks.mean import mean_of
from gossamer.algorithms.blocks.outer import AVERAGING, VELOCITY, begin_at_mean, gossips, start_of
from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.diloco import DiLoCo
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.memory import wide
from gossamer.state import DELTAS, State

OWN, OTHERS = f"own {DELTAS}", f"others' {DELTAS}"


@dataclass(frozen=True, kw_only=True)
class EagerDiLoCo(DiLoCo):
    """:class:`DiLoCo` whose average of outer deltas travels for a whole period, while no worker waits for it: the outer step of
    worker i after period t takes ``Δ_i,t/p + (mean Δ_t−1 − Δ_i,t−1/p)``, its own delta and those that the others had one
    period before (none in the first).

    Each worker has outer weights x and a velocity v of its own. They differ by what the last deltas of the workers do, and no
    more: every delta enters every worker's x, with the same weight, at most one period later; at the end of a run,
    what the others have learned in its last period is in nobody's.

    The messages and bytes of DiLoCo per exchange, spread over ``every - 1`` steps: deltas leave in the step after the outer
    step, and before the first one all weights become their mean. Memory: as DiLoCo, and two more deltas in full precision.
    Not the choice where the average is there after a few steps: DiLoCo with that ``delay`` learns from newer deltas.

    Source: Kale et al. 2025 (arXiv 2502.12996).

    Raises:
        ConfigurationError: ``every`` is below 2; ``delay``, ``merge``, ``lag`` or ``outlier`` is given; or ``averaging``
            is over weights.
    """

    every: int = 32
    """Not changeable: the others' deltas of a period are used in the next one."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.every < 2 or self.delay != 1 or self.merge is not None or self.lag or self.outlier is not None:
            raise ConfigurationError(
                "EagerDiLoCo has its deltas under way for a period of at least 2 steps, and adds outer steps without delay: "
                f"set every to 2 or more, and neither delay nor merge, lag or outlier; got {self!r}"
            )
        if gossips(self.averaging):
            raise ConfigurationError(f"EagerDiLoCo averages over all workers; got averaging={self.averaging!r}, over weights")

    @property
    def traits(self) -> Traits:
        return replace(super().traits, by_samples=False)  # at an outer step nobody knows the others' samples

    @property
    def cadence(self) -> Cadence:
        beat = replace(self.averaging.cadence.beats[0], every=self.every, delay=0)
        return Cadence((beat, replace(beat, offset=1, delay=self.every - 1)))

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return outer.alone(bucket, state, OWN, OTHERS)
        sends, ctx = ctx.step % self.every, replace(ctx, step=ctx.step // self.every)
        if sends:
            return (yield from self._send(bucket, state, ctx))
        weights, start = wide(bucket.flat), start_of(bucket, state)
        if start is None:
            return (yield from begin_at_mean(bucket, weights, state, ctx))
        own = start - weights
        if VELOCITY not in state:  # the first outer step: all weights may have been loaded after those were taken
            start = yield from mean_of(bucket, start, ctx)
        gradient = state[OTHERS].add(own, alpha=1 / ctx.world)
        outer.step(start, gradient, bucket, state, self.rate, self.momentum, self.nesterov)
        difference = outer.landed(weights, bucket, state)
        state[OWN] = own  # whatever it is: the others see it
        return difference

    def _send(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        """Average the deltas of the last outer step, if there was one; nothing is added to the weights, but what is not finite
        shows in those of all workers."""
        unsent, shown = state.get(OWN), bucket.flat.zero_()
        if unsent is not None:
            mean = yield from self.averaging.exchange(bucket.holding(unsent.clone()), state.scoped(AVERAGING), ctx)
            state[OTHERS] = mean - unsent / ctx.world
            state.keep_where(~torch.linalg.vector_norm(mean).isfinite())
            state.scoped(OWN).forget()
            shown.masked_fill_(~mean.isfinite(), torch.nan)
        return shown
