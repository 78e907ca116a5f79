"""Forward overlap: gradients go on travelling during the next forward pass, which waits for them module by module.

After backward every bucket stays open, and ``p.grad`` is pending. The user's ``optimizer.step()`` finds None there; its
hyper-parameters are noted, and the update of a bucket's parameters follows, with these, just before the first module that
holds one of them begins its forward pass. Where the loop has put other gradients there, the step is a plain one. The overlap
gains only if the buckets of the front modules overtake those of the back ones, whose gradients come first: so buckets are
launched in an order computed from a measured step, the same on all ranks. Threads and ownership: see the note in
``gossamer.comm.torch.lanes``; an open bucket belongs to its flow until it is placed.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.comm.runner import Runner, alarming, as_between_steps
from gossamer.engine.forward_order import first_uses, guards
from gossamer.engine.gradients import GradientSync
from gossamer.engine.launch import agreed_order
from gossamer.engine.loop import Loop, Subscriber
from gossamer.engine.pending_gradients import PendingGradients
from gossamer.engine.unchanged import Evidence
from gossamer.errors import UsageError
from gossamer.hooks import OwnHook, before_gradients_are_used, come_last, in_nested_step, only_own_hooks

_logger = logging.getLogger("gossamer")


class ForwardOverlap(Subscriber):
    """Takes the updates of one optimizer, bucket by bucket, as the forward pass comes to need them. Takes the place of
    ``gradients`` among the subscribers, and calls it."""

    def __init__(self, runner: Runner, loop: Loop, model: nn.Module, optimizer: Optimizer, gradients: GradientSync) -> None:
        self._runner, self._loop, self._model, self._optimizer, self._gradients = runner, loop, model, optimizer, gradients
        gradients.exchange.let_overtake()
        self._calls: dict[nn.Module, int] = {}
        """The place of each module in the forward pass, until the order is known."""
        self._needs: dict[nn.Module, tuple[int, ...]] = {}
        self._without_module: tuple[int, ...] = ()
        """Buckets of parameters of which no module's forward pass tells when they are used: waited for in the step."""
        self._sent = 0
        self._placed: dict[int, list[tuple[Parameter, Tensor]]] = {}
        """Gradients that are there and wait for the user's step."""
        self._pending = PendingGradients(runner.rank, self._arrive)
        self._unnoticed: set[int] = set()
        """Parameters (ids) that were updated because backward began, and not because a module needed them."""
        self._asked: list[dict[str, Any]] | None = None
        """The hyper-parameters of the update that is to be taken, group by group."""
        self._evidence = Evidence()
        """Of the parameters that wait for their update, when the user took the step."""

    def hook(self) -> list[Any]:
        """Install the hooks on modules and their states; returns the handles."""
        before, complete = OwnHook(self.before), OwnHook(self._complete_outside)
        handles: list[Any] = []
        for module in self._model.modules():
            handles.append(module.register_forward_pre_hook(before, prepend=True))
            handles.append(module.register_state_dict_pre_hook(complete))
            handles.append(module.register_load_state_dict_pre_hook(complete))
        handles.append(self._optimizer.register_state_dict_pre_hook(complete))
        handles.append(self._optimizer.register_load_state_dict_pre_hook(complete))
        self._last_hook = self._optimizer.register_step_pre_hook(
            OwnHook(partial(before_gradients_are_used, self._take_gradients))
        )
        handles.append(self._last_hook)
        return handles

    def _complete_outside(self, *args: Any, **kwargs: Any) -> None:
        """A state is to be saved or loaded."""
        if not self._loop.partial_step:
            self.complete()

    # -- one step ---------------------------------------------------------------------------------------------------

    def before_step(self, index: int, closure: bool) -> None:
        self._gradients.before_step(index, closure)

    def _take_gradients(self) -> None:
        """The optimizer is about to look for gradients: it finds those of later updates nowhere, or all of them."""
        if self._loop.partial_step or in_nested_step(self._optimizer):
            return
        parameters = self._gradients.parameters.values()
        if self._waiting and not self._pending.untouched(parameters):
            self.leave()
        for parameter in parameters if self._waiting else ():
            parameter.grad = None

    def _arrive(self, parameter: Parameter) -> None:
        """Somebody reads a gradient."""
        with as_between_steps():
            self._place(self._gradients.bucket_of(parameter))

    def after_step(self, index: int) -> None:
        """The user's step: note with which hyper-parameters the open buckets' updates are to be taken."""
        if not self._waiting:
            return
        groups = self._optimizer.param_groups
        self._asked = [{key: _kept(value) for key, value in group.items() if key != "params"} for group in groups]
        waiting = [p for index in self._waiting for p in self._gradients.parameters_of(index)]
        self._evidence = Evidence(waiting)
        self._take_updates(self._without_module)

    @property
    def _waiting(self) -> set[int]:
        """Buckets whose update is still to come."""
        return self._gradients.open | self._placed.keys()

    def before(self, module: nn.Module, inputs: Any) -> None:
        """``module`` begins its forward pass: its parameters must be up to date."""
        if self._asked is not None:
            needed = self._needs.get(module)
            if needed is not None:
                self._take_updates(needed)
        elif not self._gradients.hold and module.training and torch.is_grad_enabled():
            self._calls.setdefault(module, len(self._calls))

    before._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets

    def complete(self) -> None:
        """Take every update that is still to come, if the user took the step; else the weights are what they are to be."""
        if self._asked is not None:
            self._take_updates(sorted(self._waiting))
        for index in sorted(self._gradients.open):
            self._place(index)

    def conclude(self) -> None:
        """The same, and the end of the step, where all ranks do it: others may complete their updates whenever they like."""
        self.complete()
        self._gradients.conclude()

    def begin_backward(self) -> None:
        if self._asked is None and self._waiting:
            raise UsageError(
                f"rank {self._runner.rank}: another backward pass, but optimizer.step() was not called after the last one: "
                "with overlap_forward gradients do not add up; accumulate inside replica.no_sync(), and take every step"
            )
        self._unnoticed = {id(parameter) for index in self._waiting for parameter in self._gradients.parameters_of(index)}
        self.conclude()
        self._gradients.begin_backward()

    def drop(self) -> None:
        """Forget the step that was not asked for."""
        self._placed = {}

    def leave(self) -> None:
        """Put the gradients of a step that was not asked for where they would be without an overlap."""
        self.complete()
        self._pending.replace(self._placed)
        self.drop()

    def _take_updates(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index in self._waiting:
                self._place(index)
                self._update(self._placed.pop(index))
        if not self._waiting:
            self._asked = None

    def _place(self, index: int) -> None:
        if index in self._gradients.open:
            with alarming(self._runner):
                self._placed[index] = self._gradients.place(index)
                self._pending.arrived(self._placed[index])

    def _update(self, gradients: Sequence[tuple[Parameter, Tensor]]) -> None:
        """The optimizer's step, for these parameters only."""
        if not gradients:
            return
        assert self._asked is not None
        self._require_unchanged([parameter for parameter, _ in gradients])
        held = {id(parameter) for parameter, _ in gradients}
        groups = self._optimizer.param_groups
        own = [
            asked | {"params": [p for p in group["params"] if id(p) in held]}
            for asked, group in zip(self._asked, groups, strict=False)  # one that was added since took no part in the step
        ]
        before = [parameter.grad for parameter, _ in gradients]
        for parameter, grad in gradients:
            parameter.grad = grad
        self._optimizer.param_groups, self._loop.partial_step = own, True
        try:
            with as_between_steps(), only_own_hooks(self._optimizer):
                self._optimizer.step()
        finally:
            self._optimizer.param_groups, self._loop.partial_step = groups, False
            for (parameter, _), local in zip(gradients, before, strict=True):
                parameter.grad = local
        self._check_groups(own)

    def _require_unchanged(self, parameters: Sequence[Parameter]) -> None:
        """Raise if weights were changed after the step and before their update: the update would be made of other weights."""
        with as_between_steps():
            changed = self._evidence.changed(parameters)
        if changed is not None:
            name = next(name for name, parameter in self._gradients.parameters.items() if parameter is changed)
            raise UsageError(
                f"rank {self._runner.rank}: parameter {name!r} was changed between optimizer.step() and the next forward pass, "
                "in which overlap_forward updates it: call replica.wait_for_exchanges() after the step, before weights are "
                "read or changed, or leave out overlap_forward"
            )

    def _check_groups(self, used: Sequence[Mapping[str, Any]]) -> None:
        assert self._asked is not None
        for asked, group in zip(self._asked, used, strict=True):
            changed = [key for key, value in group.items() if key != "params" and value is not asked.get(key)]
            if changed:
                raise UsageError(
                    f"{type(self._optimizer).__name__} writes {', '.join(map(repr, changed))} into its parameter groups in "
                    "every step: it cannot take a step in parts; use it without overlap_forward"
                )

    # -- learning the order -----------------------------------------------------------------------------------------

    def end_backward(self) -> None:
        """Watch one pass of the plan's buckets, put them in order, and from then on leave them open."""
        gradients = self._gradients
        self._pending.forget()
        come_last(self._optimizer, self._last_hook)
        gradients.end_backward()
        self._check_unnoticed()
        if gradients.hold or not gradients.learned:
            return
        if gradients.arranged or self._runner.world == 1:
            self._begin()
        elif gradients.completed is None:
            gradients.completed = {}
            self._sent = self._counted()
        elif len(gradients.completed) == len(gradients.exchange.buckets):
            gradients.exchange.arrange(self._order(gradients.completed))
            gradients.completed = None
            self._begin()

    def _check_unnoticed(self) -> None:
        """Raise if a parameter that no module waited for was used all the same: with the weights of one step before."""
        if not self._unnoticed:
            return
        used = [name for name in self._gradients.reached() if id(self._gradients.parameters[name]) in self._unnoticed]
        self._unnoticed = set()
        if used:
            raise UsageError(
                f"rank {self._runner.rank}: parameter {used[0]!r} was used before its update: the module that holds it was "
                "called in the first steps and not in this forward pass, which used it in another way (a method, or "
                "functional.…); call the modules themselves, or leave out overlap_forward"
            )

    def restart(self) -> None:
        """The plan is another one."""
        self._gradients.completed, self._gradients.hold = None, None
        if self._gradients.arranged and self._calls:
            self._begin()

    def _begin(self) -> None:
        if self._runner.rank == 0:
            _logger.info(
                "from now on gradients travel during the next forward pass too; what clips, scales or logs them before the "
                "step waits for them there"
            )
        self._gradients.adopt_learned()
        self._gradients.hold, self._gradients.arranged = self._pending.stand_in, True
        self._assign()

    def _counted(self) -> int:
        return sum(meter.bytes for meter in self._runner.meters())

    def _order(self, completed: Mapping[int, float]) -> list[int]:
        layouts = self._gradients.exchange.plan.layouts
        positions = first_uses(self._model, self._gradients.parameters, self._calls)
        return agreed_order(
            self._runner,
            layouts,
            ready=[completed[index] for index in range(len(layouts))],
            needs=[min(positions.get(name, len(self._calls)) for name in layout.names) for layout in layouts],
            sent_share=(self._counted() - self._sent) / max(1, sum(layout.nbytes for layout in layouts)),
        )

    def _assign(self) -> None:
        """Who waits for which buckets."""
        places = {name: i for i, layout in enumerate(self._gradients.exchange.plan.layouts) for name in layout.names}
        needs: dict[nn.Module | None, set[int]] = {}
        for name, guard in guards(self._model, self._gradients.parameters, self._calls):
            needs.setdefault(guard, set()).add(places[name])
        self._without_module = tuple(sorted(needs.pop(None, ())))
        self._needs = {module: tuple(sorted(indices)) for module, indices in needs.items() if module is not None}


def _kept(value: Any) -> Any:
    """A hyper-parameter as it is now; schedulers write into tensors."""
    return value.clone() if isinstance(value, Tensor) else value
