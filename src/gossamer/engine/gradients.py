"""Gradient synchronisation: buckets fill during backward, flows run beside it, ``p.grad`` ends as the result.

Threads and ownership: see the note in ``gossamer.comm.torch.lanes``.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.base import Algorithm
from gossamer.comm.ops import maximum
from gossamer.comm.runner import CONTROL, Runner, Ticket, alarming
from gossamer.engine.discarded import Discarded
from gossamer.engine.gradient_buckets import GradientBuckets
from gossamer.engine.loop import Loop, Subscriber
from gossamer.engine.samples import GradientShare
from gossamer.engine.slots import NOT_YET, OpenStep, Slot, require_unchanged
from gossamer.engine.statistics import Statistics
from gossamer.errors import UsageError


class GradientSync(GradientBuckets, Subscriber):
    """Exchanges gradients bucket by bucket. ``step`` counts synchronised backward passes.

    ``alone``: neither weights nor optimizers are exchanged as well. ``owners``: the names of each optimizer's parameters.
    """

    def __init__(
        self,
        runner: Runner,
        loop: Loop,
        algorithm: Algorithm,
        parameters: Mapping[str, Parameter],
        statistics: Statistics,
        alone: bool = False,
        owners: Sequence[Set[str]] = (),
    ) -> None:
        super().__init__(runner, algorithm, parameters, alone, owners)
        self.step: int = 0
        self.hold: Callable[[Parameter], Tensor] | None = None
        """Where buckets stay open at the end of backward, until somebody has them placed: makes what stands for a gradient."""
        self._share, self._share_asked = (0.0, 0.0), False
        """See :meth:`residual_share`."""
        self.completed: dict[int, float] | None = None
        """When each bucket was complete, in seconds, if anyone wants to know."""
        self._loop, self._statistics, self._share_of_pass = loop, statistics, GradientShare(runner, statistics)
        self._cadence, self._takes_momentum = algorithm.cadence, algorithm.traits.takes_momentum
        self._steady = self._cadence.every_step
        self._under_way = False
        """Whether a pass has begun and not ended."""
        self._versions: list[int] = []
        """Of the parameters, when the last pass began."""
        self._copies = any(parameter.is_complex() for parameter in parameters.values())
        """Whether any gradient does not lie in its bucket."""
        self._idle = False
        self._owners = [list(names) for names in owners] or [list(parameters)]
        self._discarded = Discarded(self.exchange, self._slots, owners or [self._slots.keys()])

    def keep_used(self) -> None:
        """Before a state is saved: keep what the last pass wrote, of the optimizers that have used it."""
        if self._under_way:
            self.exchange.states.rollback()
        elif self._versions:
            self._discarded.keep_used(self._loop.waiting, self._versions)

    def hook(self) -> list[Any]:
        """Install one hook per parameter; returns the handles."""
        collect = {name: self._collector(slot) for name, slot in self._slots.items()}
        return self._loop.hook_gradients(self.parameters, collect)

    def begin_backward(self) -> None:
        waiting = self._loop.waiting
        if self._takes_momentum and not self._loop.accumulated:
            self._discarded.refuse_sums(waiting, self.step)
        if self.exchange.states.later:
            with self._statistics.exposed():
                self.exchange.states.complete()
        if self._under_way:  # an error has ended the last pass half-way
            self.exchange.states.rollback()
        elif waiting:
            self._discarded.keep_or_forget(waiting, self._versions, self._loop.first, self._loop.accumulated)
        else:
            self.exchange.commit()
        if self._learned_plan is not None:
            self.adopt_learned()
        self._idle = not self._is_due
        if self._idle or self._shelved is not None:
            self._put_away(self._over, self._idle)
        self.exchange.forget()
        self._missing = [len(layout.segments) for layout in self.exchange.plan.layouts]
        self._open, self._late = None, {}
        for slot in self._slots.values():
            slot.ready = False
        if self._statistics.samples is not None:
            self._share_of_pass.ask(self.step, self._loop.uneven, self._cadence.averages(self.step))
        self._under_way, self._versions = True, [parameter._version for parameter in self.parameters.values()]

    @property
    def _is_due(self) -> bool:
        """Whether any gradient is exchanged in the next pass."""
        return self._steady or self._cadence.due(self.step)

    @property
    def _over(self) -> bool:
        """Whether gradients are not exchanged any more."""
        return not self._is_due and self.step > max(self._cadence.changes, default=self.step)

    def _collector(self, slot: Slot) -> Callable[[], None]:
        on_device = slot.parameter.device.type != "cpu"

        def collect() -> None:
            """The hot path: see :meth:`Loop.hook_gradients`."""
            if self._idle or (slot.parameter.grad is None and len(slot.parameter._post_accumulate_grad_hooks) == 1):
                return  # unless a hook has taken it, a custom function has returned None: the parameter counts as unused
            if not self.learned:
                self._arrived.append(slot.name)
            if self._loop.nested or slot.ready:
                self._collect_late(slot)
                return
            try:
                slot.collect()
            except Exception:
                with alarming(self._runner):  # here, and not around it, where every gradient would pay for it
                    raise
            if on_device:
                self._runner.note_writer()
            slot.ready = True
            missing = self._missing
            missing[slot.bucket] -= 1
            if not missing[slot.bucket]:
                if self.completed is not None:
                    self.completed[slot.bucket] = self._runner.now()
                self._launch_ready()

        return collect

    def _collect_late(self, slot: Slot) -> None:
        """A gradient that may grow until the outermost pass is over is collected then."""
        if slot.ready and slot.name not in self._late:
            with alarming(self._runner):
                raise UsageError(
                    f"rank {self._runner.rank}: parameter {slot.name!r} got a gradient twice in one backward pass, in passes "
                    "that run inside it (reentrant activation checkpointing), after the first one was sent: use "
                    "torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
                )
        slot.ready, self._late[slot.name] = True, slot

    def _launch_ready(self) -> None:
        """Launch, in the agreed order, every bucket that is complete and has no incomplete one before it."""
        order = self.exchange.order
        while (place := self.exchange.launched) < len(order) and self._missing[order[place]] == 0:
            if self._statistics.samples is not None and self.exchange.cadences[order[place]].averages(self.step):
                self._share_of_pass.scale(self.exchange.buckets[order[place]].flat)
            self.exchange.launch(self.step, f"at step {self.step}")

    def end_backward(self) -> None:
        """Send what is left, wait for everything, put the results in place."""
        if not self._idle:
            if self._runner.world > 1:
                require_unchanged(self._runner.rank, self._slots.values(), self._versions)
            with self.exchange.transaction():
                if self.hold is not None:
                    self._leave_open(self.hold)
                else:
                    self._end()
        self.step, self._under_way = self.step + 1, False
        if not self.learned and not self._idle:
            self._learn()

    @property
    def parts_replicas(self) -> bool:
        """Whether there have been passes of which any gradient stayed this rank's own: replicas are not equal then."""
        changes = [step for change in self._cadence.changes for step in (change - 1, change)]
        steps = [step for step in (0, *changes, self.step - 1) if 0 <= step < self.step]
        return any(not cadence.due(step) for cadence in (self._cadence, *self.exchange.cadences) for step in steps)

    def before_step(self, index: int, closure: bool) -> None:
        if self._runner.world == 1 or closure or self._over or not self._owners[index]:
            return
        if self._loop.in_backward:
            name = next(iter(self._owners[index]))
            raise UsageError(f"rank {self._runner.rank}: the optimizer of parameter {name!r} steps inside backward. {NOT_YET}")
        if not self._loop.had_pass(index):
            where = " outside of no_sync()" if self._loop.passes_apart else ""
            raise UsageError(
                f"rank {self._runner.rank}: optimizer.step() at step {self.step}, but no backward pass{where} has reached a "
                "parameter of the model since the last one; the other ranks wait for this one's gradients"
            )

    def _end(self) -> None:
        unused = self._flush()
        asked = self._ask_for_usage(unused)
        with self._statistics.exposed():
            results = list(self.exchange.collect().values())
            self._place(results, unused, asked)
        self.exchange.conclude([bucket.flat for bucket in self.exchange.buckets], self.step)

    def _leave_open(self, stand_in: Callable[[Parameter], Tensor]) -> None:
        """Send what is left; no parameter has its gradient until its bucket is placed. What has none here may have one on
        another rank, and is clipped with the others then: that is waited for."""
        unused = self._flush()
        self._open = OpenStep(set(range(len(self.exchange.buckets))), unused, self._ask_for_usage(unused))
        if unused:
            with self._statistics.exposed():
                self._open.nowhere = self._nowhere(unused, self._open.asked)
        for name, parameter in self.parameters.items():
            parameter.grad = None if name in (self._open.nowhere or ()) else stand_in(parameter)

    @property
    def open(self) -> Set[int]:
        """The buckets that stayed open at the end of backward and are not placed."""
        return frozenset() if self._open is None else self._open.buckets

    def place(self, index: int) -> list[tuple[Parameter, Tensor]]:
        """Wait for an open bucket, and make its result its content. Returns the gradients that are there then."""
        assert self._open is not None
        try:
            with self.exchange.transaction(), self._statistics.exposed():
                if self._open.nowhere is None:
                    self._open.nowhere = self._nowhere(self._open.unused, self._open.asked)
                bucket = self.exchange.buckets[index]
                bucket.adopt(self.exchange.result(index))
                slots = list(self._adopted(bucket, self._open.nowhere))
                self._open.buckets.discard(index)
        except BaseException:
            self._open = None
            raise
        return [(slot.parameter, slot.gradient()) for slot in slots]

    def conclude(self) -> None:
        """All buckets are placed: the end of their step, where all ranks are at the same place, since it may communicate."""
        if self._open is None:
            return
        self._open = None
        with self.exchange.transaction():
            self.exchange.forget()
            self.exchange.conclude([bucket.flat for bucket in self.exchange.buckets], self.step - 1)
        if self._share_asked:
            self._share, self._share_asked = self.exchange.states.residual_share(), False

    def residual_share(self) -> tuple[float, float]:
        """As that of the exchange. While buckets are open they are not read: then it is that of the last step that was
        concluded after somebody had asked."""
        if self._open is None:
            return self.exchange.states.residual_share()
        self._share_asked = True
        return self._share

    def reached(self) -> list[str]:
        """The parameters whose gradients came in the last backward pass."""
        return [slot.name for slot in self._slots.values() if slot.ready]

    def _flush(self) -> set[str]:
        """Complete the buckets: a parameter that backward did not reach sends the gradient it has, or zeros.

        Returns which parameters have no gradient here.
        """
        unused = set()
        for slot in self._late.values():
            slot.collect()
        if self._late and next(iter(self._slots.values())).parameter.device.type != "cpu":
            self._runner.note_writer()
        came_all = sum(self._missing) == (self._usage is not None) + len(self._late)
        for slot in () if came_all else self._slots.values():
            if not slot.ready and slot.parameter.grad is not None:
                slot.collect()
            elif not slot.ready:
                slot.view.zero_()
                unused.add(slot.name)
        if self._usage is not None:
            bucket, number = self._usage
            if unused:
                bucket.views[number].copy_(self._numbers_of_use(unused))
            else:
                bucket.views[number].fill_(1)
        if self.completed is not None:
            now = self._runner.now()
            self.completed |= {index: now for index, missing in enumerate(self._missing) if missing}
        self._missing = [0] * len(self.exchange.buckets)
        self._launch_ready()
        return unused

    def _ask_for_usage(self, unused: set[str]) -> Ticket[Tensor] | None:
        """Ask who uses what; None if the numbers of use travel in a bucket."""
        if self._usage is not None or not self._slots:
            return None
        used, world = self._numbers_of_use(unused), self._runner.world
        return self._runner.submit(lambda: maximum(used, world), f"use of parameters at step {self.step}", CONTROL)

    def _place(self, results: list[Tensor], unused: set[str], asked: Ticket[Tensor] | None) -> None:
        """Make the results the content of the buckets, and the buckets' views the gradients."""
        moved = [bucket.adopt(result) for bucket, result in zip(self.exchange.buckets, results, strict=True)]
        # Unused on every rank: the gradient stays None, because a zero would move the parameter under AdamW.
        nowhere = self._nowhere(unused, asked) if unused or asked is not None else set()
        for bucket in self.exchange.buckets:
            if moved[bucket.index] or unused or self._copies:
                for slot in self._adopted(bucket, nowhere):
                    slot.parameter.grad = slot.gradient()
