"""Gradient buckets: the plan that says in which bucket each gradient lies and in which order buckets are launched.

Plans change between passes only; what a pass does with them is in ``gossamer.engine.gradients``.
"""

from collections.abc import Iterator, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.nn import Parameter

from gossamer.algorithms.base import Algorithm
from gossamer.bucket_plan import Plan, make_plan, plan_from_names
from gossamer.buckets import Bucket
from gossamer.comm.ops import broadcast
from gossamer.comm.runner import Runner, Ticket
from gossamer.engine.agreement import agree_on_plan
from gossamer.engine.bucket_states import Kept, of_any_plan
from gossamer.engine.exchange import Exchange
from gossamer.engine.sharding import local
from gossamer.engine.slots import OpenStep, Slot, like_gradient
from gossamer.engine.usage import USAGE, with_usage
from gossamer.errors import ConfigurationError


class GradientBuckets:
    """The buckets of one model's gradients: planned by the order of definition, then by that in which gradients come.

    ``alone``: neither weights nor optimizers are exchanged as well. ``owners``: the names of each optimizer's parameters.
    """

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        parameters: Mapping[str, Parameter],
        alone: bool,
        owners: Sequence[Set[str]],
    ) -> None:
        self.learned: bool = False
        """Whether the order in which gradients come is known."""
        self.arranged: bool = False
        """Whether the order of the buckets was chosen for an overlap with the forward pass."""
        self.parameters: dict[str, Parameter] = dict(parameters)
        self._runner, self._algorithm = runner, algorithm
        self._open: OpenStep | None = None
        self._missing: list[int] = []
        """Of each bucket: how many gradients have not come in the pass under way."""
        self._late: dict[str, Slot] = {}
        """Gradients to be collected at the end of the pass: see the note [passes inside a pass]."""
        self._slots = {name: Slot(name, parameter, runner.rank) for name, parameter in parameters.items()}
        self._arrived: list[str] = []
        self._learned_plan: Plan | None = None
        self._shelved: Plan | None = None
        """The plan to go on with, if buckets are needed again."""
        self._usage: tuple[Bucket, int] | None = None
        """Where the numbers of use are, if they travel in a bucket: the place of their view."""
        several = len(owners) > 1
        self._owner_of = {name: number for number, names in enumerate(owners) for name in names} if several else {}
        self.exchange: Exchange = Exchange(runner, algorithm, alone)
        # Until the first step has shown the order, assume that gradients come in the reverse order of definition.
        self.adopt_plan(agree_on_plan(runner, self._make_plan(dict(reversed(list(parameters.items()))))))

    def _make_plan(self, parameters: Mapping[str, Parameter]) -> Plan:
        gradients = {name: like_gradient(parameter) for name, parameter in parameters.items()}
        return make_plan(with_usage(gradients, self._algorithm), self._algorithm, owners=self._owner_of)

    def adopt_plan(self, plan: Plan) -> None:
        """Allocate buckets for ``plan``, carrying the algorithm's state over by parameter name."""
        for slot in self._slots.values():
            slot.ready = False
            slot.view = local(slot.parameter.detach())  # nothing is to hold the old buckets while the new ones are made
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
        self._missing, self._open, self._late = [], None, {}
        self.exchange.forget()

    def _put_away(self, over: bool, idle: bool) -> None:
        """Free the buckets when gradients are not exchanged any more and no residual is kept; make them again if they are."""
        if over and self.exchange.buckets and not self.exchange.states.remembers:
            plan = self.exchange.plan
            self.adopt_plan(Plan(()))
            self._shelved = plan
        elif not idle and self._shelved is not None:
            self.adopt_plan(self._shelved)

    def parameters_of(self, index: int) -> list[Parameter]:
        """The parameters in a bucket."""
        names = self.exchange.plan.layouts[index].names
        return [self.parameters[name] for name in names if name != USAGE]

    def bucket_of(self, parameter: Parameter) -> int:
        """The number of the bucket in which a parameter's gradient lies."""
        return next(slot.bucket for slot in self._slots.values() if slot.parameter is parameter)

    def _numbers_of_use(self, unused: set[str]) -> Tensor:
        return torch.tensor([name not in unused for name in self._slots], dtype=torch.uint8)

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
            still_open = self._open is not None and bucket.index in self._open.buckets
            used = bucket.segments[number].view(self.exchange.result(bucket.index)) if still_open else bucket.views[number]
        else:
            return set()
        return {name for name, anywhere in zip(self._slots, used.tolist(), strict=True) if not anywhere}

    def _learn(self) -> None:
        """Lay the buckets out in the order in which gradients really came, as rank 0 saw it."""
        self.learned = True
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

    def ended(self, step: int) -> bool:
        """Whether no pass from ``step`` on averages gradients."""
        return self._algorithm.cadence.ended(step)

    def extras_to_save(self) -> Kept:
        """What the algorithm keeps in other shapes than the parameters', as far as the next pass will know it."""
        extras = self.exchange.states.extras_by_name()
        return extras if self._learned_plan is None else of_any_plan(extras)

    def adopt_learned(self) -> None:
        """Adopt the learned plan. Not when it is learned: the gradients still lie in the old buckets, and both would be the
        most memory that a run ever needs."""
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
