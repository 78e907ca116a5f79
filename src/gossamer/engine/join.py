"""Join: ranks whose data end early keep answering, until the data of all have ended."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import IntEnum
from typing import Any

import torch
from torch.nn import Parameter

from gossamer.comm.ops import maximum
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import same_from_rank
from gossamer.engine.loop import Loop, Subscriber
from gossamer.engine.plain import read, written
from gossamer.errors import UsageError

_NO_EVENT = 2**30


class Event(IntEnum):
    """What the ranks that still train are about to do together; ``ENDED``: none of them trains any more."""

    ENDED = 0
    BACKWARD = 1
    STEP = 2  # plus the index of the optimizer


class Join(Subscriber):
    """Inside :meth:`active`, each collective event is announced; a rank that has ended mirrors it with nothing to add."""

    def __init__(
        self,
        runner: Runner,
        loop: Loop,
        parameters: Sequence[Parameter],
        after_step: Callable[[int], object] | None = None,
        in_step: Callable[[int], object] | None = None,
    ) -> None:
        """``after_step``: takes part in the exchange that follows the step of an optimizer; ``in_step``: takes the step of an
        optimizer that communicates by itself. None: there is no such exchange."""
        self.shadowing: bool = False
        self.on: bool = False
        self.training: int = runner.world
        """How many ranks take part in the last event that was announced, and have not ended."""
        self._all_stop = False
        self._runner, self._loop, self._parameters = runner, loop, parameters
        self._mirror_after, self._mirror_in = after_step, in_step

    def begin_backward(self) -> None:
        self.announce(Event.BACKWARD)

    def before_step(self, index: int, closure: bool) -> None:
        if self._mirror_in is not None:
            self.announce(Event.STEP, index)

    def after_step(self, index: int) -> None:
        if self._mirror_after is not None:
            self.announce(Event.STEP, index)

    def announce(self, event: Event, index: int = 0) -> None:
        """Say what comes next, if anyone may have ended."""
        if self.on and not self.shadowing:
            self._loop.source = self._agree(event + index)[1]

    def _agree(self, event: int) -> tuple[int, int]:
        """The event that the training ranks announce, and the last of these ranks (-1: none trains any more)."""
        training = event != Event.ENDED
        here = [int(training and rank == self._runner.rank) for rank in range(self._runner.world)]
        mine = torch.tensor([event, -event if training else -_NO_EVENT, self._runner.rank if training else -1, *here])
        most, least, last, *still = self._runner.run(
            lambda: maximum(mine, self._runner.world), "the announcement of what comes next"
        ).tolist()
        self.training = sum(still)
        if self._all_stop and 0 < self.training < self._runner.world:
            raise UsageError(
                f"rank {self._runner.rank}: rank {still.index(0)} has no more batches, and all stop there "
                "(throw_on_early_termination)"
            )
        if last >= 0 and most != -least:
            raise UsageError(
                f"rank {self._runner.rank}: ranks do different things inside join(): {_name(-least)}, {_name(most)}"
            )
        return most, last

    @contextmanager
    def active(self, conclude: Callable[[int, bool], None], of_all: bool = True, all_stop: bool = False) -> Iterator[None]:
        """Train inside; then mirror the others to their end. ``conclude(rank, uneven)`` gets a rank that trained to the
        end, and whether any did not. ``of_all``: gradients are means over all ranks, and not only over ranks that still train.
        ``all_stop``: raise on all ranks once one of them ends while others go on."""
        self.on = self._loop.uneven = True
        self._all_stop = all_stop
        try:
            with self._loop.including(self, None if of_all else Regained(self._runner, self, self._parameters)):
                yield
            mirrored = self._shadow()
            mine = torch.tensor([-1 if mirrored else self._runner.rank, bool(mirrored)], dtype=torch.int64)
            found = self._runner.run(lambda: maximum(mine, self._runner.world), "the choice of the last rank")
            last, uneven = found.tolist()
            conclude(last, bool(uneven))
        finally:
            self.on = self._loop.uneven = False
            self._loop.source = 0

    def _shadow(self) -> int:
        """Mirror events until there are none; returns how many there were."""
        mirrored = 0
        self.shadowing = True
        try:
            while (agreed := self._agree(Event.ENDED))[1] >= 0:
                event, self._loop.source = agreed
                self._mirror(event)
                mirrored += 1
        finally:
            self.shadowing = False
        return mirrored

    def _mirror(self, event: int) -> None:
        if event == Event.BACKWARD:
            self._clear_gradients()
            self._loop.pass_without_gradients()
            self._clear_gradients()
        else:
            self._clear_gradients()  # a step takes no part of the last batch once more
            index = event - Event.STEP
            if self._mirror_after is not None:
                self._mirror_after(index)
                self._loop.steps[index] += 1  # a step that is taken is counted by its hook
            else:
                assert self._mirror_in is not None, "steps are announced where they exchange something"
                self._mirror_in(index)

    def _clear_gradients(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


class Regained(Subscriber):
    """Makes gradients, which are means over all ranks, those over the ranks that have not ended."""

    def __init__(self, runner: Runner, join: Join, parameters: Sequence[Parameter]) -> None:
        self._world, self._join, self._parameters = runner.world, join, parameters

    def end_backward(self) -> None:
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        if self._join.training < self._world and gradients:
            torch._foreach_mul_(gradients, self._world / self._join.training)


def state_from_rank(runner: Runner, state: Mapping[str, Any], source: int, what: str) -> Mapping[str, Any]:
    """The ``state_dict`` of rank ``source``, on every rank; its tensors are on the host where it is another's. Collective.

    Raises:
        UsageError: on every rank, if ``what`` (whose state it is) keeps something that is no number, string or tensor.
    """
    mine, refusal = torch.empty(0, dtype=torch.uint8), ""
    if runner.rank == source:
        try:
            mine = written(state, "state")
        except TypeError as error:
            refusal, mine = str(error), torch.frombuffer(bytearray(str(error).encode()), dtype=torch.uint8)
    told = torch.tensor([len(mine), bool(refusal)])
    same_from_rank(runner, [told], source)
    size, refused = told.tolist()
    message = mine if runner.rank == source else torch.empty(size, dtype=torch.uint8)
    same_from_rank(runner, [message], source)
    if refused:
        raise UsageError(
            f"rank {runner.rank}: ranks had different numbers of batches inside join(), and {what} of rank {source} cannot be "
            f"sent to the others: {message.numpy().tobytes().decode()}"
        )
    if runner.rank == source:
        return state
    found: Mapping[str, Any] = read(message)
    return found


def _name(event: int) -> str:
    kind = Event(min(event, Event.STEP))
    return f"the step of optimizer {event - kind}" if kind == Event.STEP else _WORDS[kind]


_WORDS = {Event.ENDED: "the end", Event.BACKWARD: "a backward pass"}
