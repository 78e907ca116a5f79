"""The exchanges of weights of a replica: one for each optimizer, because each takes its steps when it likes.

Each follows the steps of its optimizer by itself; here is what concerns all of them, or the whole model."""

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import chain

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.algorithms.blocks.shares import LEFT_OUT
from gossamer.comm.runner import Runner
from gossamer.engine.exact import change, exact
from gossamer.engine.gradients import GradientSync
from gossamer.engine.history import history, skips
from gossamer.engine.lagging import catch_up, even_out, most_of_all
from gossamer.engine.members import Owner
from gossamer.engine.module_buffers import averaged, beside_parameters, check_shapes, shapes_of
from gossamer.engine.sharding import is_sharded, local, sharded_modules
from gossamer.engine.statistics import Statistics
from gossamer.engine.ties import called, ties
from gossamer.engine.turns import REMEMBERED
from gossamer.engine.weights import WeightSync
from gossamer.errors import PeerLeftError, UsageError
from gossamer.memory import as_real, wide
from gossamer.pieces import part_of


class WeightSyncs:
    """All of a replica's :class:`WeightSync`; none where no weights travel.

    ``owned``: the parameters of each optimizer. ``with_buffers``: floating-point buffers are averaged with the weights; they
    go with those of the first optimizer.
    """

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        owned: Sequence[Mapping[str, Parameter]],
        with_buffers: bool,
        statistics: Statistics,
    ) -> None:
        self._runner, self._model, self._optimizers = runner, model, optimizers
        self._algorithm = algorithm
        self._lag = algorithm.cadence.lag
        if self._lag:
            runner.let_ranks_part()
        self._all: list[WeightSync] = []
        self._turns: deque[int] = deque(maxlen=REMEMBERED)
        """Of which optimizers the last exchanges were."""
        self._tensors: dict[str, Tensor] = {}
        """All that travel, and their other names."""
        self._ties: dict[str, str] = {}
        """Other names of what travels; see :func:`gossamer.engine.ties.ties`."""
        of_weights = algorithm.part("weights")
        self._buffers_travel = False
        if of_weights is None:
            return
        beside = averaged(model) if with_buffers else {}
        self._buffers_travel, self._shapes = bool(beside), shapes_of(beside)
        self._views = [{n: p for n, p in held.items() if p.is_complex() or is_sharded(p)} for held in owned]
        self._sharded = sharded_modules(model)
        exact_weights = [{n: self._real(number, p) for n, p in held.items()} for number, held in enumerate(owned)]
        self._tensors = dict(chain.from_iterable(map(dict.items, [*exact_weights, beside])))
        self._ties = ties(self._tensors)
        for optimizer, parameters, weights in zip(optimizers, owned, exact_weights, strict=True):
            travelling = weights if self._all else weights | beside
            tensors = {name: tensor for name, tensor in travelling.items() if name not in self._ties}
            wanted = {name for name, t in weights.items() if of_weights.route(name, t).traits.history}
            own = {name: p for name, p in parameters.items() if name in wanted}
            remembered = partial(history, optimizer, own) if own else None
            number = len(self._all)
            owner = Owner(
                index=number,
                optimizer=optimizer,
                parameters=list(parameters.values()),
                changing=change(optimizer),
                current=partial(self._current, number) if self._may_move(number) else None,
                turns=self._turns,
            )
            order = number if len(optimizers) > 1 else None
            skipped = partial(skips, optimizer)
            self._all.append(WeightSync(runner, of_weights, tensors, statistics, remembered, skipped, order, owner))

    def _real(self, number: int, parameter: Parameter) -> Tensor:
        """What an optimizer keeps of a parameter exactly; of a sharded one this rank's part, of a complex one a view of its
        real numbers."""
        kept = local(exact(self._optimizers[number], parameter))
        return as_real(kept.detach()) if kept.is_complex() else kept

    def __iter__(self) -> Iterator[WeightSync]:
        return iter(self._all)

    def __getitem__(self, index: int) -> WeightSync:
        return self._all[index]

    def __len__(self) -> int:
        return len(self._all)

    @property
    def may_be_apart(self) -> bool:
        """Whether ranks may be at different steps, so that some wait for others' parts."""
        return self._lag > 0 and self._runner.world > 1

    def exchange_without_step(self, index: int) -> None:
        """Take part in the exchange after a step that another rank takes with this optimizer."""
        self._all[index].exchange_without_step()

    def conclude(self, alone: bool = False) -> None:
        """Wait for everything that is under way, and add it. ``alone``: an exchange with a rank that has left is left out."""
        if alone:
            self._runner.let_peers_leave()
        for sync in self._all:
            try:
                sync.arrive()
            except PeerLeftError:
                if not alone:
                    raise
            else:
                sync.apply_due()

    def weigh(self, tensors: Mapping[str, Tensor], arrived: bool = True) -> None:
        """Make of ``tensors`` what their mean over the ranks is made of: see :func:`weigh`."""
        for sync in self._all:
            weigh(sync, self._algorithm, tensors, arrived)

    def left_out(self) -> dict[str, float]:
        """How many outer deltas of this rank were left out of their averages, if any may be."""
        found = [number for sync in self._all for number in sync.exchange.states.extras_named(LEFT_OUT)]
        return {"left_out": float(sum(map(float, found)))} if found else {}

    def answer(self) -> bool:
        """Take part in one more exchange if it could begin without waiting; whether it did."""
        if not self._all[0].can_answer:
            return False
        self.exchange_again()
        return True

    def exchange_again(self) -> None:
        """Take part in one more exchange, where ranks may be at different steps."""
        self._all[0].begin()
        self._all[0].exchange_again()

    def catch_up(self, call: str, at_average: bool) -> None:
        """Wait until all ranks have made this ``call`` and taken part in the same exchanges. Collective.

        ``at_average``: all are inside ``consensus()``, so that nobody waits for an answer.
        """
        catch_up(self._runner, call, self._all[0], (lambda: False) if at_average else self.answer, self.exchange_again)

    def even_out(self, call: str, taken: Sequence[int], gradients: GradientSync | None) -> None:
        """Let ranks that took fewer steps take part in what they missed. Collective: all make this ``call``. ``taken``: the
        steps of each optimizer. ``gradients``, which are not averaged any more, count passes on from the largest number of
        any rank, so that the next change of algorithms is at the same pass on all."""
        even_out(self._runner, call, self._all, taken, self._turns, self.exchange_without_step)
        if gradients is not None:
            gradients.step = most_of_all(self._runner, gradients.step)

    def _may_move(self, index: int) -> bool:
        """Whether others may take the place of tensors that travel with this optimizer's weights, or of their memory."""
        return bool(self._sharded or self._ties or self._views[index] or (index == 0 and self._buffers_travel))

    def _current(self, index: int) -> dict[str, Tensor]:
        """What has taken the place of tensors that travel. Raises UsageError where that cannot be followed."""
        for module in self._sharded:
            module.reshard()  # what it has gathered is not what the parts are going to be
        current: dict[str, Tensor] = {}
        if index == 0 and self._buffers_travel:
            current = beside_parameters(self._model)
            travelling = {name: tensor for name, tensor in current.items() if name in self._shapes}
            check_shapes(self._runner, self._shapes, travelling)
            self._tensors |= travelling
        current = current | self._moved_views(index)
        for name, first in self._ties.items():
            if self._tensors[name].data_ptr() != self._tensors[first].data_ptr():
                raise UsageError(
                    f"rank {self._runner.rank}: {called(first)} and {called(name)} were the same memory when replicate() was "
                    "called, and are not any more, so that the second one would not be averaged: close the replica before the "
                    "model is moved, and replicate it again"
                )
        return current

    def _moved_views(self, index: int) -> dict[str, Tensor]:
        """Views of complex parameters, and parts of sharded ones, are of the memory that these had, which an assignment to
        ``.data``, or to what a DTensor holds, changes."""
        there = {name: self._real(index, parameter) for name, parameter in self._views[index].items()}
        moved = {name: tensor for name, tensor in there.items() if tensor.data_ptr() != self._tensors[name].data_ptr()}
        self._tensors |= moved
        return moved


@torch.no_grad()
def weigh(sync: WeightSync, algorithm: Algorithm, tensors: Mapping[str, Tensor], arrived: bool = True) -> None:
    """Make of copies of the weights, by name, what their mean over the ranks is made of, where that is not the copies.

    Nothing may be under way: see :meth:`WeightSync.arrive`. What has arrived and is not added to the weights is added to the
    copies (``arrived``, or where replicas do not count alike): it moves the mean where the algorithm does, where workers count
    by their samples, and where others have added theirs already.
    """
    counts = algorithm.traits.weighted or bool(algorithm.traits.nodes)
    if not (counts or (arrived and sync.pending)):
        return
    pieces = sync.members.pieces(tensors)
    for index, bucket in enumerate(sync.exchange.buckets):
        copies = {name: pieces[name] for name in bucket.layout.names if part_of(name)[0] in tensors}
        flat = bucket.gather(copies)
        if flat is None:
            continue
        if index in sync.pending:
            flat = sync.pending[index].added(flat)
        if counts:
            context = sync.exchange.context(sync.steps)
            flat = sync.exchange.handlers[index].hand_over(wide(flat), sync.exchange.states[index], context)
        for segment in bucket.segments:
            if segment.name in copies:
                copies[segment.name].copy_(segment.view(flat))
