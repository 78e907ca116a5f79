"""Loop: where a training loop is, and what is called at each of its events.

    begin_backward ─► gradient … gradient ─► end_backward ─► before_step ─► after_step

The events come from hooks on the model, its parameters and the optimizers. :class:`Subscriber` lists them; a feature that
is off has no subscriber, and an event that a subscriber does not override is not called.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from gossamer.comm.runner import Runner, alarming
from gossamer.engine.sharding import sharded_modules
from gossamer.engine.subscriber import Subscriber as Subscriber
from gossamer.errors import UsageError
from gossamer.hooks import OwnHook, current_task, in_nested_step, is_nested

_NONE = -2
"""The number of no backward pass; -1 is that of what is called outside of any."""


class Loop:
    """Counts backward passes and optimizer steps, and calls the subscribers.

    ``passes`` counts the backward passes that reached a parameter, ``synchronised_passes`` those outside of ``no_sync()``.
    ``accumulate``: how many passes accumulate before one is synchronised; inf where gradients are exchanged in steps.
    """

    def __init__(
        self, runner: Runner, optimizers: Sequence[Optimizer], model: nn.Module | None = None, accumulate: float = 0
    ) -> None:
        self._model = model
        self.accumulate: float = accumulate
        self._sharded = model is not None and bool(sharded_modules(model))
        self.synchronise = True
        """Whether passes are synchronised: not inside of ``no_sync()``."""
        self.passes: int = 0
        self.synchronised_passes: int = 0
        self.task: int | None = None
        """The pass that is under way and will be ended: the number of the outermost one."""
        self.first: Tensor | None = None
        """The parameter with whose gradient the pass has begun."""
        self.nested: bool = False
        """Whether passes ran inside a pass, as in reentrant activation checkpointing."""
        self.accumulated: bool = False
        """Whether passes inside ``no_sync()`` came between the last two synchronised ones."""
        self.partial_step = False
        """Whether a step of a part of the parameters is being taken (``overlap_forward``): it is not the user's step."""
        self.source = 0
        """The rank whose buffers are broadcast: one that still has batches."""
        self.uneven = False
        """Whether ranks may have different numbers of batches (``join()``): some may have no pass to undo."""
        self._runner, self._optimizers = runner, tuple(optimizers)
        self._subscribers: list[Subscriber] = []
        self._own_hooks: list[tuple[Any, int]] = []  # all hooks on a gradient, and the number of the one from here
        self._once = False  # whether gradients are collected at the end of this pass, as if it were nested
        self._root: int | None = None
        self._inside: set[int] = set()
        self._unsynchronised_task, self._apart = _NONE, 0
        self.steps: list[int] = [0] * len(self._optimizers)
        """Steps of each optimizer. Inside ``join()`` a rank without more batches counts the steps of the others."""
        self._seen = [0] * len(self._optimizers)
        """Of each optimizer's last step: how many synchronised passes there had been."""
        self.connect(())

    # -- subscribers -------------------------------------------------------------------------------------------------

    def connect(self, subscribers: Sequence[Subscriber]) -> None:
        """Call these from now on, in this order."""
        self._subscribers = list(subscribers)
        for event in ("begin_backward", "end_backward", "before_step", "after_step"):
            own = [each for each in subscribers if getattr(type(each), event) is not getattr(Subscriber, event)]
            setattr(self, f"_{event}", [getattr(each, event) for each in own])

    _begin_backward: list[Callable[[], None]]
    _end_backward: list[Callable[[], None]]
    _before_step: list[Callable[[int, bool], None]]
    _after_step: list[Callable[[int], None]]

    @contextmanager
    def including(self, subscriber: Subscriber, last: Subscriber | None = None) -> Iterator[None]:
        """Inside, call one more subscriber, before all others, and perhaps one after them."""
        others = list(self._subscribers)
        self.connect([subscriber, *others, *([last] if last is not None else [])])
        try:
            yield
        finally:
            self.connect(others)

    @property
    def synchronises(self) -> bool:
        """Whether the next pass is synchronised. Scripts for DDP say that by an attribute of the model."""
        enough = self.passes_apart - self._apart >= self.accumulate
        return enough and self.synchronise and bool(getattr(self._model, "require_backward_grad_sync", True))

    @property
    def watches_passes(self) -> bool:
        """Whether anything is called for backward passes."""
        return bool(self._begin_backward or self._end_backward)

    # -- hooks -------------------------------------------------------------------------------------------------------

    def hook_gradients(self, parameters: Mapping[str, Parameter], collect: Mapping[str, Callable[[], None]]) -> list[Any]:
        """Call ``collect[name]()`` for each gradient of a synchronised pass; returns the handles, in order."""
        handles = [
            parameter.register_post_accumulate_grad_hook(self._gradient_hook(collect.get(name)))
            for name, parameter in parameters.items()
        ]
        pairs = zip(parameters.values(), handles, strict=True)
        self._own_hooks = [(parameter._post_accumulate_grad_hooks, handle.id) for parameter, handle in pairs]
        return handles

    def _come_last(self) -> bool:
        """Be called after the hooks of others on a gradient, whenever these were registered: what they make of it is averaged,
        as under DDP, which torch calls after all of them. Returns whether there was one that would have come later."""
        late = [(own, n) for own, n in self._own_hooks if len(own) > 1 and n in own and next(reversed(own)) != n]
        for hooks, number in late:
            hooks[number] = hooks.pop(number)
        return bool(late)

    def _gradient_hook(self, collect: Callable[[], None] | None) -> Callable[[Tensor], None]:
        def on_gradient(parameter: Tensor) -> None:
            """The hot path: runs once per parameter and backward pass, amid kernels that evict it from every cache."""
            if (self.task == current_task() or self._reached(parameter)) and collect is not None:
                collect()

        return on_gradient

    def hook_outputs(self, model: nn.Module) -> Any:
        """Learn from the gradients of the model's outputs which pass is the outermost one.

        Note [passes inside a pass]: reentrant activation checkpointing runs a backward inside a backward. Gradients then come
        in inner passes, whose callbacks run at their own ends, while the exchange ends with the outermost pass. Only a
        gradient that the outermost pass computes itself can install a callback there, and the model's outputs have one.
        The exchange does not begin here: ``torch.autograd.grad`` comes through the outputs and reaches no parameter.
        """

        def on_output(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if torch.compiler.is_compiling() or not torch.is_grad_enabled():
                return
            self._come_last()
            for tensor in tree_leaves(outputs):
                if isinstance(tensor, Tensor) and tensor.requires_grad and tensor.grad_fn is not None:
                    tensor.register_hook(self._note_root)

        return model.register_forward_hook(OwnHook(on_output))

    def _note_root(self, gradient: Tensor) -> None:
        task = current_task()
        under_way = self._root is not None or self.task is not None
        if task != self._root and not (under_way and is_nested(gradient)):
            self._root = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task))

    def hook_steps(self) -> list[Any]:
        """Call the subscribers around the steps of every optimizer; returns the handles."""
        handles: list[Any] = []
        for index, optimizer in enumerate(self._optimizers):
            handles.append(optimizer.register_step_pre_hook(OwnHook(partial(self._on_step_begin, index))))
            handles.append(optimizer.register_step_post_hook(OwnHook(partial(self._on_step_end, index))))
        return handles

    def _on_step_begin(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.partial_step or in_nested_step(optimizer):
            return
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)  # the first argument is the optimizer itself
        with alarming(self._runner):
            for call in self._before_step:
                call(index, closure is not None)

    def _on_step_end(self, index: int, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.partial_step or in_nested_step(optimizer):
            return
        with alarming(self._runner):
            for call in self._after_step:
                call(index)
        self._seen[index] = self.synchronised_passes
        self.steps[index] += 1

    # -- backward passes ---------------------------------------------------------------------------------------------

    def _reached(self, parameter: Tensor) -> bool:
        """Whether a gradient that is not known to belong to the pass under way is to be communicated."""
        task = current_task()
        if self.task is not None and (task in self._inside or self._runs_inside(parameter, task)):
            return True
        if self.accumulate or not self.synchronises:
            known, root = self._unsynchronised_task, self._root
            outermost = root if root is not None and task != known and is_nested(parameter) else task
            if not self.synchronises or outermost == known:
                self.passes, self._unsynchronised_task = self.passes + (outermost != known), outermost
                return False
        with alarming(self._runner):
            self._begin(parameter, task)
        return True

    def _runs_inside(self, parameter: Tensor, task: int) -> bool:
        if not is_nested(parameter):
            return False
        self._inside.add(task)
        self.nested = True
        return True

    def _begin(self, parameter: Tensor, task: int) -> None:
        if task == -1:
            raise UsageError(
                f"rank {self._runner.rank}: a gradient came outside of any backward pass, so its end cannot be known, as in a "
                "pipeline over modules of FSDP2: give replicate() synchronize='step'"
            )
        if self.task is not None and self._runner.world > 1:  # alone, nobody waits for what an error has ended half-way
            raise UsageError(
                f"rank {self._runner.rank}: the previous backward pass has not ended: it raised an error half-way through its "
                "exchange; the ranks can no longer be matched, so this run cannot go on"
            )
        self._inside, self.first = set(), parameter
        self._once = not self.nested and self._come_last()  # of a model that is not called itself: its first hook is running
        self.nested |= self._once
        if task == self._root:
            self.task = task
        elif not is_nested(parameter):
            self.task = task
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task))
        elif self._root is not None:
            self.task, self.nested = self._root, True
            self._inside.add(task)
        else:
            raise UsageError(
                f"rank {self._runner.rank}: a backward pass runs inside another one (reentrant activation checkpointing), and "
                "the model was not called itself, so the end of the outer one cannot be known: call the model that replicate() "
                "was given, or use torch.utils.checkpoint.checkpoint(…, use_reentrant=False)"
            )
        for call in self._begin_pass():
            call()

    def _begin_pass(self) -> list[Callable[[], None]]:
        self.accumulated, self._apart = self.ended_apart, self.passes_apart
        return self._begin_backward

    def _ended(self, task: int, deferred: bool = False) -> None:
        if self._sharded and not deferred:
            # FSDP2 reduces what is left of the gradients in such a callback too, which may come after this one.
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._ended, task, True))
            return
        if task == self._root:
            self._root = None
        if task == self.task:
            with alarming(self._runner):
                self._end()

    def _end(self) -> None:
        for call in self._end_backward:
            call()
        self.nested &= not self._once
        self.task, self._unsynchronised_task = None, _NONE
        self.passes += 1
        self.synchronised_passes += 1

    def pass_without_gradients(self) -> None:
        """A synchronised pass that computes no gradient: existing ones are exchanged, or zeros."""
        self.first = None
        for call in self._begin_pass():
            call()
        self._end()

    # -- what subscribers ask ----------------------------------------------------------------------------------------

    @property
    def waiting(self) -> list[int]:
        """The numbers of the optimizers that took no step after the last synchronised pass: its gradients may be unused."""
        return [] if self.uneven else [index for index in range(len(self._seen)) if self.had_pass(index)]

    def had_pass(self, index: int) -> bool:
        """Whether a synchronised pass came after the last step of this optimizer."""
        return self.synchronised_passes > self._seen[index]

    @property
    def passes_apart(self) -> int:
        """How many passes inside ``no_sync()`` there were."""
        return self.passes - self.synchronised_passes

    @property
    def ended_apart(self) -> bool:
        """Whether the last pass was one inside ``no_sync()``."""
        return self.passes_apart != self._apart

    @property
    def in_backward(self) -> bool:
        """Whether this thread runs a backward pass."""
        return current_task() != -1
