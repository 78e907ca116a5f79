"""Gradient synchronisation: buckets fill during backward, flows run beside it, ``p.grad`` ends as the result.

Threads and ownership: see the note in ``gossamer.lanes``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.base import Algorithm
from gossamer.buckets import Plan, make_plan, plan_from_names
from gossamer.comm.ops import broadcast, maximum
from gossamer.comm.runner import CONTROL, Runner
from gossamer.errors import ConfigurationError, UsageError
from gossamer.sync.agreement import agree
from gossamer.sync.backward import Backward
from gossamer.sync.exchange import Exchange
from gossamer.sync.statistics import Statistics


class Slot:
    """One parameter's place: its bucket, its view in the bucket's flat tensor, and whether its gradient has come."""

    __slots__ = ("bucket", "name", "parameter", "ready", "view")

    def __init__(self, name: str, parameter: Parameter) -> None:
        self.name, self.parameter = name, parameter
        self.bucket, self.view, self.ready = 0, parameter.detach(), False


class GradientSync:
    """Exchanges gradients bucket by bucket. ``step`` counts synchronised backward passes."""

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        parameters: Mapping[str, Parameter],
        statistics: Statistics,
    ) -> None:
        self.step = 0
        self.learned = False
        self._runner, self._algorithm, self._statistics = runner, algorithm, statistics
        self._slots = {name: Slot(name, parameter) for name, parameter in parameters.items()}
        self._arrived: list[str] = []
        self._idle = False
        self.exchange = Exchange(runner, algorithm)
        # Until the first step has shown the order, assume that gradients come in the reverse order of definition.
        self.adopt_plan(make_plan(dict(reversed(list(parameters.items()))), algorithm))

    def hook(self, backward: Backward) -> list[Any]:
        """Install one hook per parameter; returns the handles."""
        return [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, backward, slot))
            for slot in self._slots.values()
        ]

    def adopt_plan(self, plan: Plan) -> None:
        """Allocate buckets for ``plan``, carrying the algorithm's state over by parameter name."""
        self.exchange.adopt(plan)
        for bucket in self.exchange.buckets:
            for segment, view in zip(bucket.segments, bucket.views, strict=True):
                slot = self._slots[segment.name]
                slot.bucket, slot.view = bucket.index, view
        self._reset()

    def begin(self) -> None:
        """A backward pass has produced its first gradient."""
        self._idle = not self._algorithm.due(self.step)
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.segments) for bucket in self.exchange.buckets]
        self.exchange.forget()
        for slot in self._slots.values():
            slot.ready = False

    def _on_gradient(self, backward: Backward, slot: Slot, parameter: Parameter) -> None:
        """The hot path: runs once per parameter and backward pass."""
        if not backward.reached() or self._idle:
            return
        self._collect(slot, parameter)
        if not self.learned:
            self._arrived.append(slot.name)
        slot.ready = True
        self._missing[slot.bucket] -= 1
        if self._missing[slot.bucket] == 0:
            self._launch_ready()

    @staticmethod
    def _collect(slot: Slot, parameter: Parameter) -> None:
        """Copy the gradient into its bucket, and make the bucket's view the gradient."""
        grad, view = parameter.grad, slot.view
        if grad is None:
            raise UsageError(f"parameter {slot.name!r} lost its gradient during backward")
        if grad.layout is not torch.strided:
            raise ConfigurationError(f"parameter {slot.name!r} has a sparse gradient; use sparse=False in its module")
        if grad.data_ptr() != view.data_ptr():
            view.copy_(grad.detach())
            parameter.grad = view

    def _launch_ready(self) -> None:
        """Launch, in the plan's order, every bucket that is complete and has no incomplete one before it."""
        while (index := self.exchange.launched) < len(self._missing) and self._missing[index] == 0:
            self.exchange.launch(self.step, f"at step {self.step}")

    def end(self) -> None:
        """The backward pass is over: send what is left, wait for everything, put the results in place."""
        if not self._idle:
            with self.exchange.transaction():
                self._end()
        self.step += 1
        if not self.learned and not self._idle:
            self._learn()

    def _end(self) -> None:
        used = self._flush()
        usage = self._runner.submit(
            lambda: maximum(used, self._runner.world), f"use of parameters at step {self.step}", CONTROL
        )
        with self._statistics.exposed():
            results = self.exchange.collect()
            self._place(results, self._runner.wait(usage))
            self.exchange.finish(self.step)
        self.exchange.settle([bucket.flat for bucket in self.exchange.buckets])

    def _flush(self) -> Tensor:
        """Complete the buckets: a parameter that backward did not reach sends the gradient it has, or zeros.

        Returns which parameters have a gradient here (uint8, in the order of the parameters).
        """
        for slot in self._slots.values():
            if not slot.ready and slot.parameter.grad is not None:
                self._collect(slot, slot.parameter)
            elif not slot.ready:
                slot.view.zero_()
        used = [slot.parameter.grad is not None for slot in self._slots.values()]
        self._missing = [0] * len(self.exchange.buckets)
        self._launch_ready()
        return torch.tensor(used, dtype=torch.uint8)

    def _place(self, results: list[Tensor], used: Tensor) -> None:
        """Make the results the content of the buckets, and the buckets' views the gradients."""
        anywhere = dict(zip(self._slots, used.tolist(), strict=True))
        for bucket, result in zip(self.exchange.buckets, results, strict=True):
            bucket.adopt(result)
            for segment, view in zip(bucket.segments, bucket.views, strict=True):
                slot = self._slots[segment.name]
                slot.view = view
                # Unused on every rank: the gradient stays None, because a zero would move the parameter under AdamW.
                if anywhere[segment.name]:
                    slot.parameter.grad = view

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients really came, as rank 0 saw it."""
        self.learned = True
        names = list(self._slots)
        seen = dict.fromkeys((*self._arrived, *self.exchange.plan.names))
        order = torch.tensor([names.index(name) for name in seen], dtype=torch.int64)
        if self._runner.world > 1:
            order = self._runner.run(lambda: broadcast(order), "the order of gradients")
        tensors = {names[i]: self._slots[names[i]].parameter for i in order.tolist()}
        plan = make_plan(tensors, self._algorithm)
        agree(self._runner, {"the plan of buckets": plan.digest()})
        if plan.names != self.exchange.plan.names:
            self.adopt_plan(plan)

    def load_plan(self, buckets: list[list[str]], learned: bool) -> None:
        """Restore a saved plan."""
        known = {name: slot.parameter for name, slot in self._slots.items()}
        if sorted(name for bucket in buckets for name in bucket) != sorted(known):
            raise ConfigurationError("the saved plan names other parameters than this model has")
        self.adopt_plan(plan_from_names(buckets, known, self._algorithm))
        self.learned = learned
