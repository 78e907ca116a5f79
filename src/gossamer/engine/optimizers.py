"""Optimizer synchronisation: means for an optimizer that asks for them inside its own step."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm
from gossamer.bucket_plan import Plan, make_plan
from gossamer.comm.ops import maximum
from gossamer.comm.runner import CONTROL, Runner
from gossamer.engine.bucket_states import Kept
from gossamer.engine.exchange import Exchange
from gossamer.engine.statistics import Statistics
from gossamer.memory import wide
from gossamer.optim.communicating import Write


class OptimizerSync:
    """The link of one optimizer. ``exchange`` is that of the compressed means, which remembers what it did not send."""

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        tensors: Mapping[str, Tensor],
        statistics: Statistics,
    ) -> None:
        self._runner, self._statistics = runner, statistics
        self._tensors = dict(tensors)
        self.exchange: Exchange = Exchange(runner, algorithm)
        self._exact = Exchange(runner, AllReduce(bucket_bytes=algorithm.bucket_bytes))
        self._numbers = {name: number for number, name in enumerate(tensors)}
        self._used: Callable[[], list[bool]] = lambda: [True] * len(self._tensors)
        self._results: list[Tensor] = []
        self._older: list[Tensor] = []
        """Compressed means: the last ones, which the optimizer still uses, and those before."""

    def used(self, here: Sequence[bool]) -> Callable[[], list[bool]]:
        """Ask which parameters have a gradient on any worker; the answer is waited for when it is called."""
        flags, world = torch.tensor(list(here), dtype=torch.uint8), self._runner.world
        ticket = self._runner.submit(lambda: maximum(flags, world), "the use of parameters", CONTROL)
        self._used = cache(lambda: [bool(flag) for flag in self._runner.wait(ticket).tolist()])
        return self._used

    def mean(self, write: Write, compressed: bool, step: int) -> list[Tensor]:
        """The means over the workers, in the order of the parameters."""
        exchange = self.exchange if compressed else self._exact
        if compressed and self._exact.buckets:
            self._exact.adopt(Plan(()))  # that phase is over, and its buckets are as large as the model
        self._adopt(exchange)
        if compressed:
            for bucket, used in zip(exchange.buckets, self._older, strict=False):
                bucket.recycle(used)
        with exchange.transaction():
            results = self._exchange(exchange, write, step)
        if compressed:
            for bucket, result in zip(exchange.buckets, results, strict=True):
                if result is bucket.flat:
                    bucket.give()  # the optimizer uses it, while the bucket is filled again in other memory
            self._older, self._results = self._results, results
        means = self._by_name(exchange, results)
        return [means[name] for name in self._tensors]

    def _adopt(self, exchange: Exchange) -> None:
        """Plan the buckets, once."""
        if not exchange.buckets:
            tensors = {n: wide(t) for n, t in self._tensors.items()} if exchange is self.exchange else self._tensors
            exchange.adopt(make_plan(tensors, exchange.algorithm, together=True))

    def _exchange(self, exchange: Exchange, write: Write, step: int) -> list[Tensor]:
        exchange.states.commit()
        for bucket in exchange.buckets:
            bucket.renew()
            for segment, view in zip(bucket.segments, bucket.views, strict=True):
                write(self._numbers[segment.name], view)
            exchange.launch(step, f"of the optimizer's step {step}")
        with self._statistics.exposed():
            results = list(exchange.collect().values())
        self._take_back(exchange, results, write, step)
        exchange.conclude(results, step)
        return results

    def _take_back(self, exchange: Exchange, results: Sequence[Tensor], write: Write, step: int) -> None:
        """Of the means that nobody will use, the residual of before is unsent again; and not what was written for them,
        which is the same on all workers, as none of them has a gradient."""
        used = self._used()
        if all(used):
            return
        for bucket, handler, state, result in zip(exchange.buckets, exchange.handlers, exchange.states, results, strict=True):
            for segment in bucket.segments if handler.traits.keeps_unsent else ():
                number = self._numbers[segment.name]
                if not used[number]:
                    written = torch.empty_like(mean := segment.view(result))
                    write(number, written)
                    handler.put_back(mean - written, segment, state, exchange.context(step))

    @staticmethod
    def _by_name(exchange: Exchange, results: Sequence[Tensor]) -> dict[str, Tensor]:
        return {
            segment.name: view
            for bucket, result in zip(exchange.buckets, results, strict=True)
            for segment, view in zip(bucket.segments, bucket.split(result), strict=True)
        }

    def residual_share(self) -> tuple[float, float]:
        """See ``BucketStates.residual_share``: relative to the means, as a bucket's memory may be its residual's by now."""
        return self.exchange.states.residual_share(self._results)

    def state_by_name(self) -> Kept:
        """What the compressed means remember."""
        self.exchange.states.commit()
        return self.exchange.states.by_name()

    def load_state_by_name(self, kept: Mapping[str, Mapping[str, Tensor]], extras: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state_by_name` returned."""
        if kept:
            self._adopt(self.exchange)
        self.exchange.states.load_by_name(kept, extras)
