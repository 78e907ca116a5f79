"""Optimizer synchronisation: means for an optimizer that asks for them inside its own step."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from gossamer.algorithms.all_reduce import AllReduce
from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.lossy import wide
from gossamer.buckets import make_plan
from gossamer.comm.ops import maximum
from gossamer.comm.runner import CONTROL, Runner
from gossamer.sync.exchange import Exchange, Kept
from gossamer.sync.statistics import Statistics


class OptimizerSync:
    """The link of one optimizer. ``exchange`` is that of the compressed means, which remembers what it did not send."""

    def __init__(self, runner: Runner, algorithm: Algorithm, tensors: Mapping[str, Tensor], statistics: Statistics) -> None:
        self._runner, self._statistics = runner, statistics
        self._tensors = dict(tensors)
        self.exchange = Exchange(runner, algorithm)
        self._exact = Exchange(runner, AllReduce(bucket_bytes=algorithm.bucket_bytes))
        self._results: list[Tensor] = []

    def used(self, here: Sequence[bool]) -> Callable[[], list[bool]]:
        """Ask which parameters have a gradient on any worker; the answer is waited for when it is called."""
        flags, world = torch.tensor(list(here), dtype=torch.uint8), self._runner.world
        ticket = self._runner.submit(lambda: maximum(flags, world), "the use of parameters", CONTROL)
        return lambda: [bool(flag) for flag in self._runner.wait(ticket).tolist()]

    def mean(self, tensors: Sequence[Tensor], compressed: bool, step: int) -> list[Tensor]:
        """The means over the workers, in the order of the parameters."""
        exchange = self.exchange if compressed else self._exact
        named = dict(zip(self._tensors, tensors, strict=True))
        if not exchange.buckets:
            exchange.adopt(make_plan(named, exchange.algorithm, at_once=True))
        with exchange.transaction():
            means = self._exchange(exchange, named, step)
        return [means[name] for name in self._tensors]

    def _exchange(self, exchange: Exchange, named: Mapping[str, Tensor], step: int) -> dict[str, Tensor]:
        exchange.land()
        for bucket, used in zip(exchange.buckets, self._results, strict=False):
            bucket.recycle(used)  # the optimizer has done with the means of its step before
        for bucket in exchange.buckets:
            torch._foreach_copy_(bucket.views, [named[segment.name] for segment in bucket.segments])
            exchange.launch(step, f"of the optimizer's step {step}")
        with self._statistics.exposed():
            results = self._results = exchange.collect()
        exchange.finish(step)
        exchange.settle(results)
        return {
            segment.name: view
            for bucket, result in zip(exchange.buckets, results, strict=True)
            for segment, view in zip(bucket.segments, bucket.split(result), strict=True)
        }

    def state_by_name(self) -> Kept:
        """What the compressed means remember."""
        return self.exchange.state_by_name()

    def load_state_by_name(self, kept: Mapping[str, Mapping[str, Tensor]], extras: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state_by_name` returned."""
        if kept and not self.exchange.buckets:
            momenta = {name: wide(tensor) for name, tensor in self._tensors.items()}
            self.exchange.adopt(make_plan(momenta, self.exchange.algorithm, at_once=True))
        self.exchange.load_state_by_name(kept, extras)
