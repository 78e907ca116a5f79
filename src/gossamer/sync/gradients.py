"""Gradient synchronisation: buckets fill during backward, flows run beside it, ``p.grad`` ends as the result.

Threads and ownership: see the note in ``gossamer.comm.torch.lanes``.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.hooks import RemovableHandle

from gossamer.algorithms.base import Algorithm
from gossamer.buckets import Bucket, Plan, make_plan, plan_from_names
from gossamer.comm.ops import broadcast, maximum
from gossamer.comm.runner import CONTROL, Runner, Ticket
from gossamer.errors import ConfigurationError, GossamerError, UsageError
from gossamer.sync.agreement import agree_on_plan
from gossamer.sync.alarms import alarming
from gossamer.sync.discarded import Discarded
from gossamer.sync.exchange import Exchange, Kept, of_any_plan
from gossamer.sync.loop import Loop, Subscriber
from gossamer.sync.slots import OpenStep, Slot, like_gradient
from gossamer.sync.statistics import Statistics
from gossamer.sync.usage import USAGE, with_usage

logger = logging.getLogger("gossamer")

_NOT_YET = (
    "Gradients are not averaged before the end of backward(): take the step after it, or exchange weights (gossamer.Gossip()), "
    "which leaves gradients alone"
)


class GradientSync(Subscriber):
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
        self.step = 0
        self.learned = False
        self.arranged = False
        """Whether the order of the buckets was chosen for an overlap with the forward pass."""
        self.hold = False
        """Whether buckets stay open at the end of backward, until somebody has them placed."""
        self._open: OpenStep | None = None
        self._share, self._share_asked = (0.0, 0.0), False
        """See :meth:`residual_share`."""
        self.completed: dict[int, float] | None = None
        """When each bucket was complete, in seconds, if anyone wants to know."""
        self.parameters = dict(parameters)
        self._runner, self._loop, self._algorithm, self._statistics = runner, loop, algorithm, statistics
        self._cadence, self._takes_momentum = algorithm.cadence, algorithm.traits.takes_momentum
        self._versions: list[int] = []
        """Of the parameters, when the pass under way began."""
        self._late: dict[str, Slot] = {}
        """Gradients to be collected at the end of the pass: see the note [passes inside a pass]."""
        self._slots = {name: Slot(name, parameter) for name, parameter in parameters.items()}
        self._copies = any(parameter.is_complex() for parameter in parameters.values())
        """Whether any gradient does not lie in its bucket."""
        self._handles: dict[str, RemovableHandle] = {}
        self._arrived: list[str] = []
        self._idle = False
        self._learned_plan: Plan | None = None
        self._shelved: Plan | None = None
        """The plan to go on with, if buckets are needed again."""
        self._usage: tuple[Bucket, int] | None = None
        """Where the numbers of use are, if they travel in a bucket: the place of their view."""
        self._owners = [list(names) for names in owners] or [list(parameters)]
        several = len(owners) > 1
        self._owner_of = {name: number for number, names in enumerate(owners) for name in names} if several else {}
        self.exchange = Exchange(runner, algorithm, alone, revocable=True)
        self.discarded = Discarded(self.exchange, self._slots, owners or [self._slots.keys()])
        # Until the first step has shown the order, assume that gradients come in the reverse order of definition.
        self.adopt_plan(agree_on_plan(runner, self._make_plan(dict(reversed(list(parameters.items()))))))

    def hook(self) -> list[Any]:
        """Install one hook per parameter; returns the handles."""
        collect = {name: self._collector(slot) for name, slot in self._slots.items()}
        handles = self._loop.hook_gradients(self.parameters, collect)
        self._handles = dict(zip(self.parameters, handles, strict=True))
        return handles

    def _warn_of_later_hooks(self) -> None:
        """What is registered behind ours sees gradients that may be divided, and on the wire."""
        for name, handle in self._handles.items():
            last = next(reversed(self.parameters[name]._post_accumulate_grad_hooks))
            if last != handle.id:
                logger.warning(
                    "rank %d: a hook was registered with register_post_accumulate_grad_hook() on parameter %r after "
                    "replicate(): it sees gradients that are already on their way to the other ranks, and must not change "
                    "them; register it before replicate()", self._runner.rank, name
                )  # fmt: skip
                return

    def _make_plan(self, parameters: Mapping[str, Parameter]) -> Plan:
        gradients = {name: like_gradient(parameter) for name, parameter in parameters.items()}
        return make_plan(with_usage(gradients, self._algorithm), self._algorithm, owners=self._owner_of)

    def adopt_plan(self, plan: Plan) -> None:
        """Allocate buckets for ``plan``, carrying the algorithm's state over by parameter name."""
        for slot in self._slots.values():
            slot.view = slot.parameter.detach()  # nothing is to hold the old buckets while the new ones are made
        self.exchange.adopt(plan)
        self._usage = self._learned_plan = self._shelved = None
        # As a tensor: torch takes longer to wrap a number than to scale a small gradient.
        share = torch.tensor(1 / self._runner.world, dtype=torch.float64)
        for bucket, handler in zip(self.exchange.buckets, self.exchange.handlers, strict=True):
            shares = bucket.holds_shares = handler.traits.takes_shares
            for number, segment in enumerate(bucket.segments):
                if segment.name == USAGE:
                    self._usage = bucket, number
                else:
                    slot = self._slots[segment.name]
                    slot.bucket, slot.view = bucket.index, bucket.views[number]
                    slot.share = share if shares else None
        self._reset()

    def begin_backward(self) -> None:
        waiting = self._loop.waiting
        if self._takes_momentum and not self._loop.accumulated:
            self.discarded.refuse_sums(waiting, self.step)
        if self.exchange.finishing:
            with self._statistics.exposed():
                self.exchange.land()
        self.discarded.confirm(waiting)
        self.discarded.undo(waiting, self._loop.first, self._loop.accumulated)
        self.adopt_learned()
        self._idle = not self._cadence.due(self.step)
        self._put_away()
        self._reset()
        self._versions = self._now()

    def _now(self) -> list[int]:
        """The versions of the parameters."""
        return [parameter._version for parameter in self.parameters.values()]

    @property
    def _over(self) -> bool:
        """Whether gradients are not exchanged any more."""
        return not self._cadence.due(self.step) and self.step > max(self._cadence.changes, default=self.step)

    def _put_away(self) -> None:
        """Keep no copy of the gradients where their time is over, and nothing is owed any more."""
        if self._over and self.exchange.buckets and not self.exchange.remembers:
            plan = self.exchange.plan
            self.adopt_plan(Plan(()))
            self._shelved = plan
        elif not self._idle and self._shelved is not None:
            self.adopt_plan(self._shelved)

    def _reset(self) -> None:
        self._missing = [len(bucket.segments) for bucket in self.exchange.buckets]
        self._open = None
        self._late = {}
        self.exchange.forget()
        for slot in self._slots.values():
            slot.ready = False

    def _collector(self, slot: Slot) -> Callable[[], None]:
        on_device = slot.parameter.device.type != "cpu"
        first = not slot.parameter._post_accumulate_grad_hooks
        """Whether no hook of others is called before: one could have taken the gradient."""

        def collect() -> None:
            """The hot path: see :meth:`Loop.hook_gradients`."""
            if self._idle or (slot.parameter.grad is None and first):
                return  # a custom function may return None: the parameter counts as unused
            if not self.learned:
                self._arrived.append(slot.name)
            if self._loop.nested or slot.ready:
                self._collect_late(slot)
                return
            try:
                slot.collect()
            except Exception as error:
                with alarming(self._runner):  # here, and not around it, where every gradient would pay for it
                    raise self._of_this_rank(error) from None
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

    def _of_this_rank(self, error: Exception) -> Exception:
        return type(error)(f"rank {self._runner.rank}: {error}") if isinstance(error, GossamerError) else error

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
            self.exchange.launch(self.step, f"at step {self.step}")

    def end_backward(self) -> None:
        """Send what is left, wait for everything, put the results in place."""
        if not self._idle:
            self._require_same_parameters()
            with self.exchange.transaction():
                if self.hold:
                    self._leave_open()
                else:
                    self._end()
        self.step += 1
        if not self.learned and not self._idle:
            self._learn()

    def _require_same_parameters(self) -> None:
        """Raise if parameters were updated while the gradients were on their way: by the gradient of this rank alone."""
        if self._runner.world == 1:
            return
        for slot, version in zip(self._slots.values(), self._versions, strict=True):
            parameter = slot.parameter
            if parameter._version != version or (slot.ready and parameter.grad is None):
                raise UsageError(
                    f"rank {self._runner.rank}: parameter {slot.name!r} was changed, or its gradient taken away, during the "
                    f"backward pass, by an optimizer that steps in gradient hooks? {_NOT_YET}"
                )

    def before_step(self, index: int, closure: bool) -> None:
        if self._runner.world == 1 or closure or self._over:
            return
        if self._loop.in_backward:
            name = next(iter(self._owners[index]))
            raise UsageError(f"rank {self._runner.rank}: the optimizer of parameter {name!r} steps inside backward. {_NOT_YET}")
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
            results = self.exchange.collect()
            self._place(results, unused, asked)
        self.exchange.conclude([bucket.flat for bucket in self.exchange.buckets], self.step)

    def _leave_open(self) -> None:
        """Send what is left; no parameter has a gradient until its bucket is placed."""
        unused = self._flush()
        self._open = OpenStep(set(range(len(self.exchange.buckets))), unused, self._ask_for_usage(unused))
        for parameter in self.parameters.values():
            parameter.grad = None

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
            self._share, self._share_asked = self.exchange.residual_share(), False

    def residual_share(self) -> tuple[float, float]:
        """As that of the exchange. While buckets are open they are not read: then it is that of the last step that was
        concluded after somebody had asked."""
        if self._open is None:
            return self.exchange.residual_share()
        self._share_asked = True
        return self._share

    def parameters_of(self, index: int) -> list[Parameter]:
        """The parameters in a bucket."""
        names = self.exchange.plan.layouts[index].names
        return [self.parameters[name] for name in names if name != USAGE]

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

    def _numbers_of_use(self, unused: set[str]) -> Tensor:
        return torch.tensor([name not in unused for name in self._slots], dtype=torch.uint8)

    def _ask_for_usage(self, unused: set[str]) -> Ticket[Tensor] | None:
        """Ask who uses what; None if the numbers of use travel in a bucket."""
        if self._usage is not None:
            return None
        used, world = self._numbers_of_use(unused), self._runner.world
        return self._runner.submit(lambda: maximum(used, world), f"use of parameters at step {self.step}", CONTROL)

    def _place(self, results: list[Tensor], unused: set[str], asked: Ticket[Tensor] | None) -> None:
        """Make the results the content of the buckets, and the buckets' views the gradients."""
        moved = [bucket.adopt(result) for bucket, result in zip(self.exchange.buckets, results, strict=True)]
        # Unused on every rank: the gradient stays None, because a zero would move the parameter under AdamW.
        nowhere = self._nowhere(unused, asked)
        for bucket in self.exchange.buckets:
            if moved[bucket.index] or unused or self._copies:
                for slot in self._adopted(bucket, nowhere):
                    slot.parameter.grad = slot.gradient()

    def _adopted(self, bucket: Bucket, nowhere: set[str]) -> Iterator[Slot]:
        """The slots of a bucket whose content is a result: all but those of parameters that are used nowhere."""
        for segment, view in zip(bucket.segments, bucket.views, strict=True):
            if segment.name == USAGE:
                continue
            slot = self._slots[segment.name]
            slot.view = view
            if segment.name not in nowhere:
                yield slot
            else:
                self.exchange.take_back(bucket.index, segment)

    def _nowhere(self, unused: set[str], asked: Ticket[Tensor] | None) -> set[str]:
        """Which of the parameters that have no gradient here have none on any rank."""
        if asked is not None:
            used = self._runner.wait(asked)
        elif unused:
            bucket, number = self._usage  # type: ignore[misc]
            still_open = bucket.index in self.open
            used = bucket.segments[number].view(self.exchange.result(bucket.index)) if still_open else bucket.views[number]
        else:
            return set()
        return {name for name, anywhere in zip(self._slots, used.tolist(), strict=True) if not anywhere}

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients really came, as rank 0 saw it."""
        self.learned = True
        self._warn_of_later_hooks()
        names = list(self._slots)
        seen = dict.fromkeys((*self._arrived, *(name for name in self.exchange.plan.names if name != USAGE)))
        order = torch.tensor([names.index(name) for name in seen], dtype=torch.int64)
        if self._runner.world > 1:
            order = self._runner.run(lambda: broadcast(order), "the order of gradients")
        tensors = {names[i]: self._slots[names[i]].parameter for i in order.tolist()}
        plan = agree_on_plan(self._runner, self._make_plan(tensors))
        if plan.names != self.exchange.plan.names:
            self._learned_plan = plan

    @property
    def next_plan(self) -> Plan:
        """That of the next pass. What was learned is laid out when it begins, and not when a state is saved: what was kept back
        of gradients that nobody used could not be taken back any more."""
        return self.exchange.plan if self._learned_plan is None else self._learned_plan

    def extras_to_save(self) -> Kept:
        """What the algorithm keeps in other shapes than the parameters', as far as the next pass will know it."""
        extras = self.exchange.extras_by_name(confirmed=True)
        return extras if self._learned_plan is None else of_any_plan(extras)

    def adopt_learned(self) -> None:
        """Lay the buckets out as learned. Not at once: the parameters' gradients still lie in the old ones, and both together
        would be the most memory that a run ever needs."""
        if self._learned_plan is not None:
            self.adopt_plan(self._learned_plan)

    def load_plan(self, buckets: list[list[str]], learned: bool, order: list[int] | None, anew: bool = False) -> None:
        """Restore a saved plan, and the order of launch if one was chosen. ``anew``: only the order of the parameters, because
        the algorithm has other settings."""
        known: dict[str, Tensor] = {name: like_gradient(slot.parameter) for name, slot in self._slots.items()}
        names = [name for bucket in buckets for name in bucket if name != USAGE] or list(reversed(known))
        if sorted(names) != sorted(known):
            raise ConfigurationError("the saved plan names other parameters than this model has")
        if anew or not buckets:
            self.adopt_plan(agree_on_plan(self._runner, self._make_plan({name: self.parameters[name] for name in names})))
            self.learned, self.arranged = learned, False
            return
        if USAGE in (name for bucket in buckets for name in bucket):
            known = with_usage(known, self._algorithm)
            # Of the type that it has there: the plan may be of another order of parameters, and so of another neighbour.
            beside = next((name for bucket in buckets if USAGE in bucket for name in bucket if name != USAGE), None)
            if beside in known:
                known[USAGE] = torch.empty(len(self._slots), dtype=known[beside].dtype, device=known[beside].device)
        self.adopt_plan(agree_on_plan(self._runner, plan_from_names(buckets, known, self._algorithm, self._owner_of)))
        self.learned, self.arranged = learned, order is not None
        if order is not None:
            self.exchange.arrange(order)
