"""Weighing: ranks that count in the mean by their numbers of samples, and what cannot be averaged so."""

from gossamer.algorithms.base import Algorithm
from gossamer.checks import is_number
from gossamer.engine.assembly import Parts
from gossamer.errors import ConfigurationError, UsageError


class Weighed:
    """How much a rank counts: a base of :class:`gossamer.Replica`."""

    _parts: Parts

    def weigh(self, samples: float) -> None:
        """Count so many samples (or tokens) of this rank: in the next mean, ranks count by their samples, and not alike.

        For batches of different sizes: of gradients that are means over a rank's own batch, the result is the mean over all
        samples, as of one large batch. Call it on every rank before each backward pass whose gradients are exchanged; several
        calls add up (of passes inside ``no_sync()``, whose losses you divide by the samples of them all). Where weights are
        exchanged, call it in every step: weights, or outer deltas, count by the samples since their last exchange.

            replica.weigh(len(inputs))
            loss(model(inputs), targets).backward()

        The first call is collective. A rank may have none (0). Inside :meth:`join` ranks whose batches have ended have none, so
        that nothing is divided by the world; call ``weigh(0)`` once before that block. Costs one small message to each rank per
        exchange; with weights, per bucket. A mean over replicas (:meth:`consensus`) counts them alike.

        Raises:
            ConfigurationError: a number below 0; or exchanges among peers (``Gossip()``), which keep the plain mean of all
                workers, and in which no worker knows the samples of all.
            UsageError: in a pass, on the rank that did not call it before.
        """
        if not is_number(samples) or not 0 <= samples < float("inf"):
            raise ConfigurationError(f"weigh() takes a number of samples, at least 0; got {samples!r}")
        statistics = self._parts.statistics
        if self._parts.runner.world == 1:
            return
        if statistics.samples is None:
            self._begin_weighing()
        statistics.samples = (statistics.samples or 0.0) + samples
        statistics.weighings += 1

    def _begin_weighing(self) -> None:
        parts = self._parts
        if parts.join.on:
            raise UsageError(
                "the first weigh() inside join(): a rank without batches would not know of it; call weigh(0) before"
            )
        check(parts, parts.algorithm)
        self._come_together("weigh()")

    def _come_together(self, call: str) -> None:
        """Wait until all ranks have made this call."""
        raise NotImplementedError


def check(parts: Parts, algorithm: Algorithm) -> None:
    """Raise ConfigurationError where ranks cannot count by samples with ``algorithm``."""
    weights = algorithm.part("weights")
    reasons = {
        f"{type(parts.optimizers[0]).__name__} communicates by itself": bool(parts.links),
        "statistics=True measures the noise of gradients of equal batches": parts.statistics.noise is not None,
        f"the exchanges of weights of {algorithm!r} keep the plain mean of all workers; LocalSGD() and DiLoCo() average by "
        "samples, with averaging= over all workers": weights is not None and not weights.traits.by_samples,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ConfigurationError(f"ranks cannot be weighed by their samples: {reason}")
