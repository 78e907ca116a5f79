"""Weight synchronisation: weights leave after the optimizer's step, and the result is added before its next one.

Between the two the message travels while forward and backward go on. Adding the average just before the next local
update (and not after it) keeps the learning rate's meaning: the gradient that is then applied was computed on the
weights that were sent. Threads and ownership: see the note in ``gossamer.lanes``.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, wrong_shape
from gossamer.buckets import Bucket, make_plan
from gossamer.comm.runner import Runner, Ticket
from gossamer.state import State
from gossamer.sync.statistics import Statistics


class WeightSync:
    """Exchanges the weights that one optimizer updates (and the floating-point buffers given to it)."""

    def __init__(self, runner: Runner, algorithm: Algorithm, tensors: Mapping[str, Tensor], statistics: Statistics) -> None:
        self._runner, self._algorithm, self._statistics = runner, algorithm, statistics
        self._tensors = dict(tensors)
        # Forward order: it is fixed, so it needs no learning, and every exchange has the whole next step to finish.
        self.plan = make_plan(self._tensors, algorithm.bucket_bytes)
        self.buckets = [Bucket(index, layout) for index, layout in enumerate(self.plan.layouts)]
        self.states = [State(bucket.flat) for bucket in self.buckets]
        self.step_state = State(torch.zeros(()))
        self._members = [[self._tensors[s.name] for s in bucket.segments] for bucket in self.buckets]
        self._tickets: list[Ticket[Tensor]] = []
        self._deltas: list[Tensor] = []
        self._ctx = Context(0, runner.rank, runner.members)

    @torch.no_grad()
    def launch(self, step: int) -> None:
        """Send the weights as they are now."""
        self.land()
        ctx = self._ctx = Context(step, self._runner.rank, self._runner.members)
        for bucket, members, state in zip(self.buckets, self._members, self.states, strict=True):
            torch._foreach_copy_(bucket.views, members)
            label = f"bucket {bucket.index} ({bucket.layout.names[0]} …) after step {step}"
            self._tickets.append(
                self._runner.submit(
                    lambda bucket=bucket, state=state: self._algorithm.exchange(bucket, state, ctx),  # type: ignore[misc]
                    label,
                    bucket.index % self._runner.lanes,
                )
            )

    def arrive(self) -> None:
        """Wait for the exchange that is under way; its result stays pending."""
        if not self._tickets:
            return
        with self._statistics.exposed():
            deltas = [self._runner.wait(ticket) for ticket in self._tickets]
        self._tickets = []
        for bucket, delta in zip(self.buckets, deltas, strict=True):
            if delta.shape != bucket.flat.shape:
                raise wrong_shape(self._algorithm, bucket, delta)
        self._deltas = deltas
        flow = self._algorithm.finish(self.buckets, self.step_state, self._ctx)
        if flow is not None:
            self._runner.run(lambda: flow, f"finish of step {self._ctx.step}")
        for state in (*self.states, self.step_state):
            state.commit()

    @torch.no_grad()
    def land(self) -> None:
        """Add what the last exchange brought."""
        self.arrive()
        for bucket, members, delta in zip(self.buckets, self._members, self._deltas, strict=False):
            torch._foreach_add_(members, bucket.split(delta))
        self._deltas = []

    def state_by_name(self) -> dict[str, dict[str, Tensor]]:
        """The algorithm's state and the delta not yet added, ``{key: {parameter name: tensor}}``."""
        self.arrive()
        kept: dict[str, dict[str, Tensor]] = {}
        for index, (bucket, state) in enumerate(zip(self.buckets, self.states, strict=True)):
            flats = {key: state[key] for key in state}
            if self._deltas:
                flats["pending"] = self._deltas[index]
            for key, flat in flats.items():
                kept.setdefault(key, {}).update(zip(bucket.layout.names, bucket.split(flat), strict=True))
        return kept

    def load_state_by_name(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state_by_name` returned."""
        self.arrive()
        self._deltas = []
        for key, tensors in kept.items():
            flats = [self._gather(bucket, tensors) for bucket in self.buckets]
            if key == "pending":
                self._deltas = flats
                continue
            for state, flat in zip(self.states, flats, strict=True):
                state[key] = flat
                state.commit()

    @staticmethod
    def _gather(bucket: Bucket, tensors: Mapping[str, Tensor]) -> Tensor:
        flat = torch.zeros_like(bucket.flat)
        for segment in bucket.segments:
            if segment.name in tensors:
                segment.view(flat).copy_(tensors[segment.name])
        return flat
