"""LocalSGD: every worker trains alone for some steps, and then all go on from their mean."""

from dataclasses import dataclass

from torch import Tensor

from gossamer.algorithms.base import Context, changeable
from gossamer.algorithms.blocks.mean import way_to_mean
from gossamer.algorithms.blocks.meeting import Spaced, check_steps
from gossamer.algorithms.cadence import Cadence, every
from gossamer.algorithms.traits import Traits
from gossamer.buckets import Bucket
from gossamer.checks import is_number, is_whole
from gossamer.comm.ops import Flow
from gossamer.errors import ConfigurationError
from gossamer.state import State


@dataclass(frozen=True, kw_only=True)
class LocalSGD(Spaced):
    """Every ``every``-th step each worker's weights become the mean over all workers; in between, nothing is exchanged.

    The weights travel while the next forward and backward pass go on, and the mean is there just before the update that
    follows: its gradient is the only one that was computed on weights of before. With ``delay=0`` each worker waits at the end
    of the step instead, and goes on from the mean (to rounding), as in the papers. With a ``delay`` of more steps, at most
    ``every``, so many steps hide the exchange; counted in steps, whatever the network does. What a worker learns meanwhile is
    kept: the difference that the exchange makes to the weights that were sent is added; with ``merge`` the weights become
    ``merge·w + (1 − merge)·mean`` instead. The optimizer's state stays each worker's own.

    ``lag``: workers of different speed. Nobody waits for a late worker until so many further steps: the others train on, and go
    on from the exchange when it is there; what a late worker has learned is in the next mean, ``every`` steps on at the least.
    With ``lag=every`` one at half speed delays no other. Count by samples then (:meth:`gossamer.Replica.weigh`).

    Per exchange the messages of an all-reduce, and its bytes in full precision, whatever the weights are kept in: per step
    1/``every`` of those of an exact all-reduce of gradients. They come in one step: ``in_parts(8, LocalSGD(every=1))`` averages
    as often as ``every=8`` does, an eighth of the weights in each step. What is summed are weights, p of them: between two
    averages their mean is to move by more than p·2⁻²⁴ of a weight, or rounding swallows it.

    ``dense``: in so many first steps gradients are averaged exactly (post-local SGD): then, where weights still move fast,
    workers would run apart. By default ten times ``every`` from 8 steps on, and with fewer, or ``lag``, none. It counts as
    replica.step does, and is ``after(dense, LocalSGD(dense=0))``.

    Not the choice where data differ much between workers, or where a message through the
    whole ring of workers is what must be avoided: there take :class:`Gossip`. For hundreds of steps alone take :class:`DiLoCo`.

    Source: Stich 2018 (arXiv 1805.09767); Lin et al. 2018 (arXiv 1808.07217), post-local SGD.
    """

    every: int = changeable(8)
    delay: int = changeable(1)
    merge: float | None = changeable(None)
    dense: int | None = changeable(None)
    lag: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_whole(self.delay, 0):
            raise ConfigurationError(
                "delay must be one of 1 (the mean is added before the next update, and travels until then), more steps, and 0 "
                f"(in the same step, which waits for it); got {self.delay!r}"
            )
        check_steps("lag", self.lag, least=0)
        if self.dense is not None and not is_whole(self.dense, 0):
            raise ConfigurationError(f"dense must be a number of steps, or 0 for none; got {self.dense!r}")
        if self.dense and self.lag:
            raise ConfigurationError(
                f"dense={self.dense} averages the gradients of all workers in the same step, and lag={self.lag} lets them lag; "
                "set dense=0 or lag=0"
            )
        if self.merge is not None and not (is_number(self.merge) and 0 <= self.merge < 1):
            raise ConfigurationError(
                "merge must be the share of its own weights that a worker keeps, from 0 to below 1, or None; got "
                f"{self.merge!r}"
            )

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", by_samples=True, dense=self.dense_steps)

    @property
    def dense_steps(self) -> int:
        """In how many first steps gradients are averaged."""
        if self.dense is not None:
            return self.dense
        return 10 * self.every if self.every >= LONG and not self.lag else 0

    @property
    def cadence(self) -> Cadence:
        return every(self.every, lag=self.lag, delay=self.delay, merge=self.merge)

    def exchange(self, bucket: Bucket, state: State, ctx: Context) -> Flow[Tensor]:
        if ctx.world == 1:
            return bucket.flat.zero_()
        return (yield from way_to_mean(bucket, ctx))


LONG = 8
"""Steps alone from which workers run apart at the start of a run. A small GPT with Adam, 4 workers, 2,000 steps, DiLoCo of 30
steps: 0.32 nats behind an all-reduce from the start, and 0.06 before it with a dense start of 300."""
