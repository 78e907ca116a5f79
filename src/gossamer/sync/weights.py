"""Weight synchronisation: weights leave after the optimizer's step, and the result is added before its next one.

Between the two the message travels while forward and backward go on. Adding the average just before the next local
update (and not after it) keeps the learning rate's meaning: the gradient that is then applied was computed on the
weights that were sent. Threads and ownership: see the note in ``gossamer.lanes``.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm, Context, wrong_shape
from gossamer.buckets import Bucket, make_plan
from gossamer.comm.runner import Runner, Ticket
from gossamer.state import State
from gossamer.sync.statistics import Statistics

PENDING = "(pending)"
"""The name under which the delta that is not yet added is saved, beside the algorithm's own names."""


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

    def follow(self, tensors: Mapping[str, Tensor]) -> None:
        """Go on with ``tensors`` where they have replaced others (a module may assign a new tensor to a buffer)."""
        replaced = {name: t for name, t in tensors.items() if name in self._tensors and self._tensors[name] is not t}
        if replaced:
            self._tensors |= replaced
            self._members = [[self._tensors[s.name] for s in bucket.segments] for bucket in self.buckets]

    @torch.no_grad()
    def launch(self, step: int) -> None:
        """Send the weights as they are now."""
        self.land()
        with self._transaction():
            self._launch(step)

    def _launch(self, step: int) -> None:
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
        with self._transaction():
            self._arrive()

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """After an error inside, nothing is under way, and the state is what it was before the exchange."""
        try:
            yield
        except BaseException:
            self._tickets = []
            for state in (*self.states, self.step_state):
                state.rollback()
            raise

    def _arrive(self) -> None:
        with self._statistics.exposed():
            deltas = [self._runner.wait(ticket) for ticket in self._tickets]
        self._tickets = []
        for bucket, delta in zip(self.buckets, deltas, strict=True):
            if delta.shape != bucket.flat.shape:
                raise wrong_shape(self._algorithm, bucket, delta)
        flow = self._algorithm.finish(self.buckets, self.step_state, self._ctx)
        if flow is not None:
            self._runner.run(lambda: flow, f"finish of step {self._ctx.step}")
        self._deltas = deltas
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
            flats = dict(state.items())
            if self._deltas:
                flats[PENDING] = self._deltas[index]
            for key, flat in flats.items():
                kept.setdefault(key, {}).update(zip(bucket.layout.names, bucket.split(flat), strict=True))
        return kept

    def load_state_by_name(self, kept: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state_by_name` returned."""
        self.arrive()
        for bucket, state in zip(self.buckets, self.states, strict=True):
            state.load({key: bucket.gather(tensors) for key, tensors in kept.items() if key != PENDING})
        deltas = [bucket.gather(kept.get(PENDING, {})) for bucket in self.buckets]
        self._deltas = [delta for delta in deltas if delta is not None]
