"""Gradient synchronisation: buckets fill during backward, flows run beside it, ``p.grad`` ends as the result.

Threads and ownership: see the note in ``gossamer.lanes``.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.base import Algorithm, Context
from gossamer.buckets import Bucket, Plan, make_plan, plan_from_names
from gossamer.comm.ops import all_reduce, broadcast
from gossamer.comm.runner import CONTROL, Runner, Ticket
from gossamer.errors import ConfigurationError, UsageError
from gossamer.state import State
from gossamer.sync.agreement import agree
from gossamer.sync.backward import Backward
from gossamer.sync.scaling import any_non_finite
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
        self.states: list[State] = []
        self.buckets: list[Bucket] = []
        self.step_state = State(torch.zeros(()))
        # Until the first step has shown the order, assume that gradients come in the reverse order of definition.
        self.adopt_plan(make_plan(dict(reversed(list(parameters.items()))), algorithm.bucket_bytes))

    def hook(self, backward: Backward) -> list[Any]:
        """Install one hook per parameter; returns the handles."""
        return [
            slot.parameter.register_post_accumulate_grad_hook(partial(self._on_gradient, backward, slot))
            for slot in self._slots.values()
        ]

    def adopt_plan(self, plan: Plan) -> None:
        """Allocate buckets for ``plan``, carrying the algorithm's state over by parameter name."""
        kept = self.state_by_name()
        self.plan = plan
        self.buckets = [Bucket(index, layout) for index, layout in enumerate(plan.layouts)]
        for bucket in self.buckets:
            for segment, view in zip(bucket.segments, bucket.views, strict=True):
                slot = self._slots[segment.name]
                slot.bucket, slot.view = bucket.index, view
        self.load_state_by_name(kept)
        self._reset()

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """The algorithm's state, ``{key: {parameter name: tensor}}``."""
        kept: dict[str, dict[str, Tensor]] = {}
        for bucket, state in zip(self.buckets, self.states, strict=True):
            for key, flat in state.items():
                kept.setdefault(key, {}).update(zip(bucket.layout.names, bucket.split(flat), strict=True))
        return kept

    def load_state_by_name(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state_by_name` returned, whatever the plan is now."""
        self.states = [State(bucket.flat) for bucket in self.buckets]
        for bucket, state in zip(self.buckets, self.states, strict=True):
            state.load({key: bucket.gather(tensors) for key, tensors in kept.items()})

    def begin(self) -> None:
        """A backward pass has produced its first gradient."""
        self._reset()

    def _reset(self) -> None:
        self._missing = [len(bucket.segments) for bucket in self.buckets]
        self._tickets: list[Ticket[Tensor]] = []
        for slot in self._slots.values():
            slot.ready = False

    def _on_gradient(self, backward: Backward, slot: Slot, parameter: Parameter) -> None:
        """The hot path: runs once per parameter and backward pass."""
        if not backward.reached():
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
        while len(self._tickets) < len(self.buckets) and self._missing[len(self._tickets)] == 0:
            self._launch(len(self._tickets))

    def _launch(self, index: int) -> None:
        bucket, state, ctx = self.buckets[index], self.states[index], self._context()
        label = f"bucket {index} ({bucket.layout.names[0]} …) at step {self.step}"
        self._tickets.append(
            self._runner.submit(lambda: self._algorithm.exchange(bucket, state, ctx), label, index % self._runner.lanes)
        )

    def _context(self) -> Context:
        return Context(self.step, self._runner.rank, self._runner.members)

    def end(self) -> None:
        """The backward pass is over: send what is left, wait for everything, put the results in place."""
        try:
            used = self._flush()
            usage = self._runner.submit(lambda: all_reduce(used, "max"), f"use of parameters at step {self.step}", CONTROL)
            with self._statistics.exposed():
                results = [self._runner.wait(ticket) for ticket in self._tickets]
                self._place(results, self._runner.wait(usage))
                self._finish()
        except BaseException:
            for state in (*self.states, self.step_state):
                state.rollback()
            raise
        self._settle()
        self.step += 1
        if not self.learned:
            self._learn()

    def _settle(self) -> None:
        """Keep what the flows wrote, unless the gradient is not finite: a residual would not lose that any more.

        The result is the same on all ranks, so all of them keep it, or none does.
        """
        states = (*self.states, self.step_state)
        drafts = [tensor for state in states for tensor in state.drafts()]
        finite = not drafts or any_non_finite([*drafts, *(bucket.flat for bucket in self.buckets)]).item() == 0
        for state in states:
            if finite:
                state.commit()
            else:
                state.rollback()

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
        self._missing = [0] * len(self.buckets)
        self._launch_ready()
        return torch.tensor(used, dtype=torch.uint8)

    def _place(self, results: list[Tensor], used: Tensor) -> None:
        """Make the results the content of the buckets, and the buckets' views the gradients."""
        self._tickets = []
        anywhere = dict(zip(self._slots, used.tolist(), strict=True))
        for bucket, result in zip(self.buckets, results, strict=True):
            if result.shape != bucket.flat.shape:
                name, expected = type(self._algorithm).__name__, list(bucket.flat.shape)
                raise ConfigurationError(
                    f"{name}.exchange returned shape {list(result.shape)} for {bucket}; expected {expected}"
                )
            bucket.adopt(result)
            for segment, view in zip(bucket.segments, bucket.views, strict=True):
                slot = self._slots[segment.name]
                slot.view = view
                # Unused on every rank: the gradient stays None, because a zero would move the parameter under AdamW.
                if anywhere[segment.name]:
                    slot.parameter.grad = view

    def _finish(self) -> None:
        flow = self._algorithm.finish(self.buckets, self.step_state, self._context())
        if flow is not None:
            self._runner.run(lambda: flow, f"finish of step {self.step}")

    def gradients(self) -> list[Tensor]:
        """Every gradient there is, as one tensor per bucket."""
        return [bucket.flat for bucket in self.buckets]

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients really came, as rank 0 saw it."""
        self.learned = True
        names = list(self._slots)
        seen = dict.fromkeys((*self._arrived, *self.plan.names))
        order = torch.tensor([names.index(name) for name in seen], dtype=torch.int64)
        if self._runner.world > 1:
            order = self._runner.run(lambda: broadcast(order), "the order of gradients")
        tensors = {names[i]: self._slots[names[i]].parameter for i in order.tolist()}
        plan = make_plan(tensors, self._algorithm.bucket_bytes)
        agree(self._runner, {"the plan of buckets": plan.digest()})
        if plan.names != self.plan.names:
            self.adopt_plan(plan)

    def load_plan(self, buckets: list[list[str]], learned: bool) -> None:
        """Restore a saved plan."""
        known = {name: slot.parameter for name, slot in self._slots.items()}
        if sorted(name for bucket in buckets for name in bucket) != sorted(known):
            raise ConfigurationError("the saved plan names other parameters than this model has")
        self.adopt_plan(plan_from_names(buckets, known))
        self.learned = learned
