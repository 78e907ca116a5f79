"""Weight synchronisation: weights leave after the optimizer's step, and the result is added before its next one.

Between the two the message travels while forward and backward go on. Adding the average just before the next local update keeps
the learning rate's meaning: the gradient that is then applied was computed on the weights that were sent. With a delay of
several steps (``Beat.delay``) each bucket has a step of its own, whatever the network does: a resumed run is bit-identical.
Where an exchange may lag, it is added before the first update at which it is there; the next one begins when the algorithm is
due again, so that ranks at different steps meet in the one of the same number. Threads: see ``gossamer.comm.torch.lanes``.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from gossamer.algorithms.base import Algorithm
from gossamer.bucket_plan import make_plan
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import agree_on_plan
from gossamer.engine.ahead import Ahead
from gossamer.engine.apply import Pending, pack
from gossamer.engine.bucket_states import Kept
from gossamer.engine.exchange import Exchange
from gossamer.engine.history import agree_on_history, halve_at_most, keep_squares_valid, skipped_anywhere, weight_of
from gossamer.engine.loop import Subscriber
from gossamer.engine.members import Members, Owner
from gossamer.engine.pending import PENDING, loaded, saved
from gossamer.engine.samples import SAMPLES, Samples
from gossamer.engine.statistics import Statistics
from gossamer.errors import UsageError

EXCHANGES = "(exchanges)"
"""The name under which their number is saved, where ranks may lag."""


class WeightSync(Subscriber):
    """Exchanges the weights that one optimizer updates (and the floating-point buffers given to it), at its steps.

    ``history``: what else belongs to the weights, once the optimizer has made it; see ``gossamer.engine.history``. ``skipped``:
    whether it leaves out the step that is being taken. ``number``: of this optimizer, where there are several, whose exchanges
    have to come in one order on all ranks. ``owner``: the optimizer.
    """

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        tensors: Mapping[str, Tensor],
        statistics: Statistics,
        history: Callable[[], dict[str, Tensor]] | None = None,
        skipped: Callable[[], bool] = lambda: False,
        number: int | None = None,
        owner: Owner | None = None,
    ) -> None:
        self._runner, self._algorithm, self._statistics = runner, algorithm, statistics
        self._cadence = algorithm.cadence  # worked out through all parts, so not in every step
        self._history, self._skipped, self._extended = history, skipped, False
        self._number = number if runner.world > 1 else None
        self._owner: Owner = Owner() if owner is None else owner
        self.clock: Callable[[], int] | None = None
        """The number of the step (from 1) that is taken, where it is not this optimizer's own: of the pass."""
        self.members: Members = Members(runner.rank, tensors, self._cadence.parts, self._owner.current)
        self.exchange: Exchange = Exchange(runner, algorithm, finite=False)
        self._ahead = Ahead()
        self.samples: Samples = Samples(statistics)
        # Forward order: it is fixed, so it needs no learning, and every exchange has the whole next step to finish.
        self._lay_out()
        agree_on_plan(runner, self.exchange.plan)
        self._step = 0
        self.pending: dict[int, Pending] = {}
        """By bucket, what is under way or has come, and is not added yet."""
        self._lag = self._cadence.lag
        self._changes = self._cadence.changes
        self.exchanges: int = 0
        """How many were begun; the same on all ranks, unless they may lag."""
        self.steps: int = 0
        """Of the optimizer, as exchanges are numbered. Who meets whom follows from these, not from backward passes, of which
        there may be several to a step: with two, every second partner would never be met."""
        self._begun = not algorithm.traits.moves_mean
        """Whether :meth:`begin` has nothing more to do."""
        self.history_saved: list[str] | None = None
        """What was exchanged of the optimizer's history where the state was saved that this one goes on from."""

    @property
    def history_names(self) -> list[str] | None:
        """What the optimizer remembers and is exchanged; None as long as that is not known."""
        return [name for name in self.members.tensors if weight_of(name) != name] if self._extended else None

    def _lay_out(self) -> None:
        self.exchange.adopt(make_plan(self.members.pieces(), self._algorithm, together=True))
        self._ahead.forget()
        self.members.adopt(self.exchange.buckets)

    def before_step(self, index: int, closure: bool) -> None:
        if index != self._owner.index:
            return
        owned = self._owner.parameters
        if owned and not closure and self._runner.world > 1 and all(p.grad is None for p in owned):
            raise UsageError(
                f"rank {self._runner.rank}: optimizer.step() at step {self.steps}, but no parameter of "
                f"{type(self._owner.optimizer).__name__} has a gradient"
            )
        self.begin()
        if not self._cadence.late:
            self.prepare(self.upcoming)

    def after_step(self, index: int) -> None:
        if index == self._owner.index:
            if self._cadence.late:
                self.apply_due(self.following(self.upcoming))
            self._send(self.upcoming)

    def exchange_without_step(self) -> None:
        """Take part in the exchange after a step that another rank takes, with the weights as they are."""
        self.begin()
        upcoming = max(self.upcoming, self.steps + 1)  # where passes are counted, that rank may have had one more
        self.apply_due(self.following(upcoming))
        self._send(upcoming)

    @property
    def upcoming(self) -> int:
        """The number of the step (from 1) that is taken next."""
        return self.steps + 1 if self.clock is None else self.clock()

    def _send(self, upcoming: int) -> None:
        self._owner.turns.append(self._owner.index)
        self.launch(upcoming)
        if any(each.until <= self.steps for each in self.pending.values()):  # without a delay
            self.apply_due(self.steps)

    def _follow_history(self) -> None:
        """The optimizer makes its history in its first step, and other tensors when it is loaded."""
        if self._history is None:
            return
        tensors = self._history()
        if self.history_saved is not None:
            tensors = {name: tensors[name] for name in self.history_saved if name in tensors}
        if self._extended:
            self.members.follow(tensors)
            return
        if skipped_anywhere(self._runner, self._skipped):
            return
        self.apply_due()  # of steps before that were left out: buckets are others from here on
        self.members.tensors |= agree_on_history(self._runner, tensors)
        self._extended, samples = True, self.samples.saved(self.exchange.buckets)
        self._lay_out()
        self.samples.load(samples, self.exchange.buckets)

    @torch.no_grad()
    def begin(self) -> None:
        """Before the first update, when weights are equal on all ranks: see :meth:`Algorithm.begin`."""
        if self._begun or self.steps:
            return
        self._begun = True
        self.members.follow_moved()
        with self.exchange.transaction():
            for bucket in self.exchange.buckets:
                pack(bucket, self.members.of_buckets[bucket.index])
                self.exchange.handlers[bucket.index].begin(bucket, self.exchange.states[bucket.index], self.exchange.context(0))
            self.exchange.states.commit()

    @torch.no_grad()
    def prepare(self, step: int) -> None:
        """Before an update: add what is due, and copy the weights that are extrapolated after it (``ahead``). ``step``: as for
        :meth:`launch`."""
        if self.members.may_move:
            self.members.follow_moved()
        upcoming = self.following(step)
        with self._owner.changing():
            self._apply_due(upcoming)
            for index in self.exchange.due_at(upcoming):
                if self.exchange.cadences[index].ahead(upcoming):
                    self._ahead.remember(self.exchange.buckets[index], self.members.of_buckets[index])

    @torch.no_grad()
    def launch(self, step: int) -> None:
        """Send the weights as they are now, if the algorithm wants to at this ``step`` of the replica; where exchanges may lag,
        only if nothing is under way."""
        if self.members.may_move:
            self.members.follow_moved()
        upcoming = self.following(step)
        with self._owner.changing() if self._lag else nullcontext():  # what lags may be there by now
            self._apply_due(upcoming)
            self.steps = upcoming
            if self._statistics.samples is not None and not (self._cadence.runs(upcoming) and self._cadence.runs(upcoming - 1)):
                self.samples.begin()  # those of a dense start are in its gradients
            if not (self._lag and self.exchange.launched) and self._cadence.due(self.steps):
                self._begin(self._cadence.step_of(self.exchanges) if self._lag else self.steps)

    def following(self, step: int) -> int:
        """The optimizer's next step: one more, but on the side of every change of parts on which the replica's ``step`` is."""
        begun = [change for change in self._changes if change <= step]
        ahead = [change for change in self._changes if change > step]
        return min([max([self.steps + 1, *begun]), *(change - 1 for change in ahead)])

    @torch.no_grad()
    def exchange_again(self) -> None:
        """Take part in one more exchange, because others do, whatever step this rank is at."""
        self.apply_due()
        self._begin(self._cadence.step_of(self.exchanges))

    @property
    def can_answer(self) -> bool:
        """Whether one more exchange could begin without waiting. The first one waits for what the optimizer will remember."""
        return self.exchange.arrived and (self._extended or self._history is None)

    def _begin(self, step: int) -> None:
        self._step = step
        self.exchanges += 1
        self._follow_history()
        with self._forgetting(), self.exchange.transaction():
            due = self.exchange.due_at(step)
            first = set() if self._number is None else self.exchange.first_on_lanes(due)
            for index in due:
                bucket, cadence = self.exchange.buckets[index], self.exchange.cadences[index]
                if ahead := cadence.ahead(step):
                    self._ahead.pack(bucket, self.members.of_buckets[index], ahead)
                else:
                    pack(bucket, self.members.of_buckets[index])
                merge = cadence.merge(step) if self._runner.world > 1 else None
                sent = None if merge is None else bucket.flat.to(bucket.layout.dtype, copy=True)
                self.pending[index] = Pending(self.steps + cadence.delay(step) + self._lag, merge, sent)
                samples = None if self._statistics.samples is None else self.samples.take(index)
                self.exchange.launch_due(index, step, f"after step {step}", self._number if index in first else None, samples)

    @torch.no_grad()
    def arrive(self, indices: Collection[int] | None = None) -> None:
        """Wait for what is under way, of these buckets only if ``indices`` are given; the results stay pending."""
        if not self.exchange.launched:
            return
        with self._forgetting(), self.exchange.transaction():
            with self._statistics.exposed():
                came = self.exchange.collect(indices)
            for index, result in came.items():
                self.pending[index].arrived(result)
            self.exchange.finish(self._step)
            self.exchange.commit(came if self.exchange.launched else None)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """After an error inside, nothing is pending but what has come."""
        try:
            yield
        except BaseException:
            self.pending = {index: each for index, each in self.pending.items() if each.result is not None}
            raise

    @torch.no_grad()
    def apply_due(self, step: float = math.inf) -> None:
        """Add what is due by the optimizer's ``step``, and what is exchanged again after it; where exchanges may lag, what has
        come."""
        self.members.follow_moved()
        with self._owner.changing():
            self._apply_due(step)

    def _apply_due(self, step: float) -> None:
        if self._lag and self.exchange.arrived:
            step = math.inf
        again = set() if self._lag or not self.steps < step < math.inf else set(self.exchange.due_at(int(step)))
        due = [index for index, each in self.pending.items() if each.until <= step or index in again]
        if not due:
            return
        self.arrive(due)
        if self._extended and self._history is not None:
            self.members.follow(self._history())
        with self._adding():
            for index in due:
                self.pending.pop(index).add_to(self.members.of_buckets[index], self.exchange.buckets[index])

    @contextmanager
    def _adding(self) -> Iterator[None]:
        """Inside, deltas are added; what may not be negative is not, afterwards."""
        before = [tensor.clone() for tensor in self.members.variances]
        yield
        if before:
            halve_at_most(self.members.variances, before)
        if self._extended:
            keep_squares_valid(self.members.tensors)

    def state_by_name(self) -> Kept:
        """The algorithm's state and the delta not yet added, ``{key: {parameter name: tensor}}``."""
        self.arrive()
        buckets = self.exchange.buckets
        kept = self.exchange.states.by_name() | saved(self.pending, buckets, self.steps + 1) | self.samples.saved(buckets)
        if self._lag:
            kept[EXCHANGES] = {next(iter(self.members.tensors)): torch.tensor(self.exchanges)}
        return kept

    def load_state_by_name(self, kept: Mapping[str, Mapping[str, Tensor]], extras: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Put back what :meth:`state_by_name` returned."""
        self.arrive()
        self.pending = {}
        self.exchanges = max((int(number) for number in kept.get(EXCHANGES, {}).values()), default=0)
        if self._history is not None and (self._history() or self.history_saved == []):  # else it comes with the first step
            self._follow_history()
        own = {key: tensors for key, tensors in kept.items() if not key.startswith((PENDING, EXCHANGES, SAMPLES))}
        self.exchange.states.load_by_name(own, extras)
        self.pending = loaded(kept, self.exchange.buckets, self.steps + 1)
        self.samples.load(kept, self.exchange.buckets)
