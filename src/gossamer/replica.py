"""Replica: the handle on a replicated model; it drives the flows from the hooks of the training loop."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm, Context
from gossamer.comm.runner import Runner
from gossamer.errors import UsageError
from gossamer.optim.communicating import Communicating
from gossamer.optim.gossip_adamw import stop_telling, tell_how_many
from gossamer.optim.nested import in_nested_step
from gossamer.sync import checkpoint, mixing
from gossamer.sync.agreement import same_from_rank
from gossamer.sync.backward import Backward, alarming
from gossamer.sync.checks import Watch, held_by, named_parameters
from gossamer.sync.consensus import at_average, become_average, distance
from gossamer.sync.exact import changing
from gossamer.sync.gradients import GradientSync
from gossamer.sync.hooks import OwnHook
from gossamer.sync.join import Event, Join, state_from_rank
from gossamer.sync.module_buffers import (
    Buffers,
    beside_parameters,
    floating,
    hook_forward,
    named_buffers,
    synchronise_buffers,
)
from gossamer.sync.optimizers import OptimizerSync
from gossamer.sync.overlap import ForwardOverlap, NoOverlap
from gossamer.sync.scaling import LossScale, agree_on_overflow
from gossamer.sync.statistics import Statistics
from gossamer.sync.ties import once
from gossamer.sync.turns import Turns
from gossamer.sync.weight_syncs import WeightSyncs
from gossamer.sync.weights import WeightSync

logger = logging.getLogger("gossamer")


class Replica:
    """What :func:`gossamer.replicate` returns. The model itself is unchanged and is used as before.

    ``step`` counts the synchronised backward passes; ``algorithm`` is what was chosen.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        algorithm: Algorithm,
        runner: Runner,
        buffers: Buffers,
        scaler: Any,
        overlap_forward: bool = False,
    ) -> None:
        self.algorithm = algorithm
        self.step = 0
        self._model, self._optimizers, self._runner = model, tuple(optimizers), runner
        self._buffers, self._loss_scale = buffers, LossScale(scaler)
        self._parameters = named_parameters(model)
        self._trainable = {name: p for name, p in self._parameters.items() if p.requires_grad}
        held = [set(map(id, held_by(optimizer))) for optimizer in self._optimizers]
        self._owned = [{name: p for name, p in self._trainable.items() if id(p) in ids} for ids in held]
        """The parameters of each optimizer."""
        self._statistics = Statistics(runner)
        self._watch = Watch(model, optimizers, self._parameters)
        self._backward = Backward(runner, self._begin_backward, self._end_backward)
        self._weights = WeightSyncs(
            runner, algorithm, model, self._optimizers, self._owned, buffers == "average", self._statistics
        )
        self._gradients = self._open_gradients()
        self._links = self._open_links()
        weight = next(iter(self._trainable.values())) if self._weights else None
        self._turns = Turns(runner, self._backward, len(self._owned), weight, self._loss_scale)
        self._overlap = NoOverlap()
        if overlap_forward and self._gradients is not None:
            self._overlap = ForwardOverlap(runner, model, self._optimizers[0], self._gradients)
        mirror = {
            Event.BUFFERS: self._mirror_buffers,
            Event.BACKWARD: self._mirror_backward,
            Event.WEIGHTS: self._mirror_step if self._links else self._mirror_weights,
        }
        self._join = Join(runner, mirror)
        self._awaits_forward = False
        """Whether buffers are synchronised before forward passes of the model, and none was seen."""
        self._handles = self._hook()
        self._closed = self._at_average = False
        if self._weights and runner.world > 1:
            mixing.refuse_for(self._differing, runner.rank)

    # -- what the user calls ------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the first one outside communicates the sum."""
        before, self._backward.synchronise = self._backward.synchronise, False
        try:
            yield
        finally:
            self._backward.synchronise = before

    @contextmanager
    def join(self) -> Iterator[None]:
        """Train inside when ranks may have different numbers of batches; every rank enters.

        A rank that leaves the block early goes on answering the others (with zero gradients, which count in the mean
        over all ranks, or with its weights as they are) until all have left. The model then is that of the ranks that
        trained to the end, and so is, where gradients are exchanged, what the optimizer remembers (not the state of a
        scheduler). Costs one small message per exchange. An optimizer that communicates by itself (``OneBitAdam``)
        goes on taking its steps there, without gradients. Where some have left early, the others' optimizers are sent to them
        (numbers, strings and tensors; one that keeps anything else is refused). Not with a ``scaler=``, nor where gradients and
        weights both move (``Hierarchical(Gossip())``, ``after``).
        """
        if self.algorithm.may_lag:
            raise UsageError("join() is not needed where exchanges may lag: a rank may have as many batches as it likes")
        if self._loss_scale.on:
            raise UsageError("join() cannot be used with scaler=: a rank without batches would not know by what others scale")
        if self._gradients is not None and self._weights:
            raise UsageError(f"join() cannot be used with {self.algorithm!r}, which moves both gradients and weights")
        if isinstance(self._overlap, ForwardOverlap):
            raise UsageError("join() cannot be used with overlap_forward: a rank without batches has no forward pass")
        with alarming(self._runner), self._join.active(self._conclude_join):
            yield

    @contextmanager
    def consensus(self) -> Iterator[nn.Module]:
        """Inside, the model holds the average of all replicas (to evaluate or save it); afterwards its own weights.

        Collective: every rank enters. For gradient algorithms the replicas are equal and nothing is moved. Parameters that
        were frozen when the replica was made are left as they are. It may be nested, and left by an exception; an optimizer's
        step inside is refused, because it would be undone. The average of a whole run is left in the model by
        ``close(average=True)``.
        """
        if not self._weights or self._runner.world == 1 or self._at_average:
            yield self._model
            return
        self._refuse_in_join("consensus()")
        self.wait_for_exchanges()
        tensors = once({**floating(self._trainable), **beside_parameters(self._model)})
        self._at_average = True
        try:
            with at_average(self._runner, self._optimizers, tensors, self._weights.weigh):
                yield self._model
        finally:
            self._at_average = False

    def consensus_distance(self) -> float:
        """How far the replicas are apart now: the root mean square over workers of ‖w − w̄‖ / ‖w̄‖, w̄ the mean of the weights
        (without those that were frozen when the replica was made).

        Zero for gradient algorithms, and inside :meth:`consensus`. Collective, and costs an all-reduce of the weights: for
        now and then.
        """
        if not self._weights or self._runner.world == 1 or self._at_average:
            return 0.0
        self._refuse_in_join("consensus_distance()")
        self.wait_for_exchanges()
        return distance(self._runner, once(floating(self._trainable)), self._weights.weigh)

    def catch_up(self) -> None:
        """Where exchanges may lag (``lag=``): wait until every rank is here and all have taken part in the same ones.

        Collective. Call it before the ranks wait for each other in any other way (a barrier, a mean of losses): one that
        waits there does not answer those that still train. The methods of a replica call it by themselves.
        """
        if self._weights.may_be_apart:
            with alarming(self._runner):
                self._weights.catch_up(self._at_average)

    def answer(self) -> bool:
        """Where exchanges may lag: take part in one more, if it could begin at once; whether it did. Between steps.

        For a loop that waits for other ranks in its own way: one that calls this meanwhile holds nobody up.
        ``RingShuffle(…, replica=replica)`` does.
        """
        if self._closed or self._at_average or not self._weights.may_be_apart:
            return False
        with alarming(self._runner):
            return self._weights.answer()

    def wait_for_exchanges(self) -> None:
        """Wait until no exchange is under way. What weights brought is added before the next update, as always; updates that
        the next forward pass would take (``overlap_forward``) are taken now.

        Collective where exchanges may lag.
        """
        self._overlap.complete()
        self.catch_up()
        for sync in self._weights:
            sync.arrive()

    def metrics(self) -> dict[str, float]:
        """Counters of this rank since the start: ``bytes_sent``, ``messages_sent`` (payload handed to the transport),
        ``compression_ratio`` (bytes of an exact all-reduce of the same tensors, divided by ``bytes_sent``),
        ``exposed_seconds`` (the loop stood still for communication), ``wire_seconds`` and ``local_seconds`` (lanes
        waiting for the network, and encoding, decoding and computing), ``elapsed_seconds``, ``step``.
        And as of now: ``residual_norm``, the L2 norm of what is not sent yet, relative to that of the last exchange. (With
        ``overlap_forward``: of the last step that was complete after it was asked for before.)"""
        exchanges = [sync.exchange for sync in self._weights] + [link.exchange for link in self._links]
        shares = [sync.exchange.residual_share() for sync in self._weights]
        shares += [link.residual_share() for link in self._links]
        exchanged = sum(exchange.exchanged_bytes for exchange in exchanges) + sum(link.exact_bytes for link in self._links)
        if self._gradients is not None:
            shares.append(self._gradients.residual_share())
            exchanged += self._gradients.exchange.exchanged_bytes
        return self._statistics.read(self.step, exchanged, shares)

    def state_dict(self) -> dict[str, Any]:
        """Plan, counters and the algorithm's state of this rank, under a key with its rank.

        Collective, between steps and outside of :meth:`consensus`: the state belongs to the rank's own weights.
        """
        self._require_own_weights("state_dict()")
        self._overlap.conclude()
        self.catch_up()
        if self._gradients is not None:
            self._gradients.discarded.confirm(self._turns.waiting)
        weights = checkpoint.fingerprint(self._parameters.values()) if self._weights else ""
        syncs = [*self._weights, *self._links]
        state = checkpoint.collect(self._runner, self.algorithm, self.step, self._gradients, syncs, weights)
        return state | {"scale": self._loss_scale.saved()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned on this rank. Collective.

        Load the optimizer first, before :func:`gossamer.replicate`; then the model, because ``replicate()`` copies rank 0's
        weights to all ranks; then this. Where weights travel, a warning tells if they are not those of the saved state.

        With another number of ranks give every rank the merged dictionaries of all old ones: what was not sent yet is
        summed and shared out (its mean stays), an exchange of weights begins anew, and a warning says so.
        """
        self._require_own_weights("load_state_dict()")
        self.catch_up()
        with alarming(self._runner):
            syncs: list[WeightSync | OptimizerSync] = [*self._weights, *self._links]
            self._overlap.conclude()
            self._overlap.drop()
            self.step = checkpoint.restore(state, self._runner, self.algorithm, self._gradients, syncs)
            checkpoint.compare_weights(state, self._runner, self._parameters.values())
            self._loss_scale.load(state.get("scale"), None if self._gradients is None else self._gradients.exchange.rescale)
            self._overlap.restart()

    def close(self, average: bool = False) -> None:
        """Add what is still under way, remove all hooks and leave. The model stays usable, alone.

        ``average``: it then holds the average of all replicas, the model of the whole run. Every rank closes with it.

        Collective where exchanges may lag (``lag=``): a rank that fails had better end without it, so that the others are told.

        Raises:
            UsageError: inside :meth:`consensus`, whose end would undo it.
        """
        if self._closed:
            return
        if self._at_average:
            raise UsageError("close() inside consensus() would be undone at its end: close the replica after that block")
        self._closed = True
        try:
            self._overlap.complete()
            self._overlap.leave()
        finally:
            self._release(average)

    def _release(self, average: bool) -> None:
        self.algorithm.detach(self._optimizers)
        for optimizer in self._optimizers:
            stop_telling(optimizer)
            if isinstance(optimizer, Communicating):
                optimizer.link = None
        for handle in self._handles:
            handle.remove()
        self._watch.release()
        try:
            self.catch_up()
            self._weights.conclude()
            if average and self._weights and self._runner.world > 1:
                beside = beside_parameters(self._model)
                become_average(self._runner, self._optimizers, floating(self._trainable), beside, self._weights.weigh)
        finally:
            self._runner.close()

    # -- what the hooks call ------------------------------------------------------------------------------------

    def _open_gradients(self) -> GradientSync | None:
        of_gradients = self.algorithm.part("gradients")
        if of_gradients is None:
            return None
        alone = not self._weights and not any(isinstance(optimizer, Communicating) for optimizer in self._optimizers)
        owners = [owned.keys() for owned in self._owned]
        return GradientSync(self._runner, of_gradients, self._trainable, self._statistics, alone, owners)

    def _open_links(self) -> list[OptimizerSync]:
        names = {id(parameter): name for name, parameter in self._parameters.items()}
        links: list[OptimizerSync] = []
        for optimizer in self._optimizers:
            if isinstance(optimizer, Communicating):
                held_here = {names[id(parameter)]: parameter for parameter in optimizer.parameters()}
                announce = partial(self._announce_step, len(links))
                optimizer.link = OptimizerSync(self._runner, optimizer.algorithm, held_here, self._statistics, announce)
                links.append(optimizer.link)
        return links

    def _hook(self) -> list[Any]:
        handles: list[Any] = []
        if self._gradients is not None:
            handles += self._gradients.hook(self._backward)
        else:
            note = self._backward.note_gradient()
            handles += [parameter.register_post_accumulate_grad_hook(note) for parameter in self._trainable.values()]
        for index, optimizer in enumerate(self._optimizers):
            handles.append(optimizer.register_step_pre_hook(OwnHook(self._before_step(index))))
            handles.append(optimizer.register_step_post_hook(OwnHook(self._after_step(index))))
        handles += self._overlap.hook()
        by_forward = self._buffers == "broadcast" or (self._buffers == "average" and not self._weights)
        if by_forward and self._runner.world > 1 and named_buffers(self._model):
            handles.append(hook_forward(self._model, self._synchronise_buffers))
            self._awaits_forward = True
        return handles

    def _begin_backward(self) -> None:
        self._turns.begin_backward()
        self._overlap.begin_backward()
        if self._gradients is not None and self.algorithm.takes_momentum and not self._turns.accumulated:
            self._gradients.discarded.refuse_sums(self._turns.waiting, self.step)
        self._join.announce(Event.BACKWARD)
        if self._gradients is not None:
            self._loss_scale.follow(self._gradients.exchange.rescale if self._gradients.exchange.remembers else None)
            # Inside join() some ranks have no passes, and so nothing is undone.
            self._gradients.begin(() if self._join.on else self._turns.waiting)

    def _end_backward(self) -> None:
        if self._gradients is not None:
            self._gradients.end()
        self._overlap.after_backward()
        if self._awaits_forward and self._model.training and not self._join.shadowing:
            self._awaits_forward = False
            logger.warning(
                "rank %d: a backward pass, but %s was not called: its buffers are synchronised when it is, and so not at all; "
                "call it itself, or give replicate() buffers='local'", self._runner.rank, type(self._model).__name__
            )  # fmt: skip
        agree_on_overflow(self._runner, self._loss_scale.scaler, [owned.values() for owned in self._owned])
        self.step += 1

    def _before_step(self, index: int) -> Any:
        def before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._overlap.updating or in_nested_step(optimizer):  # a part of a step that the user took
                return
            with alarming(self._runner):
                self._watch.check()
                if self._at_average:
                    raise UsageError("optimizer.step() inside replica.consensus(): the model's own weights come back after it")
                # A closure runs backward inside the step. The first argument is the optimizer itself.
                closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
                if closure is None and not self._join.shadowing:
                    self._turns.require_backward(index, self.step)
                self._tell_how_many(optimizer)
                if self._weights and not self.algorithm.lands_late:
                    self._weights.prepare(index, self.step)

        return before_step

    def _after_step(self, index: int) -> Any:
        def after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            if self._overlap.updating or in_nested_step(optimizer):
                return
            with alarming(self._runner):
                self._overlap.ask()
                if self._weights:
                    if self.algorithm.lands_late:
                        self._weights.land(index)
                    self._join.announce(Event.WEIGHTS, index)
                    self._weights.launch(index, self.step)
            self._turns.note_step(index)

        return after_step

    def _tell_how_many(self, optimizer: Optimizer) -> None:
        """Of how many gradients the mean update is made, if the optimizer asks for it."""

        def workers() -> int:
            ctx = Context(self.step - 1, self._runner.rank, self._runner.members, self._runner.nodes)
            return self.algorithm.gradients_apart(ctx)

        tell_how_many(optimizer, workers)

    def _synchronise_buffers(self) -> None:
        self._awaits_forward = False
        if self._backward.synchronise:
            with alarming(self._runner), self._statistics.exposed():
                source = self._join.announce(Event.BUFFERS)
                synchronise_buffers(self._runner, self._model, self._buffers, source)

    # -- what a rank does whose data have ended -----------------------------------------------------------------

    def _mirror_buffers(self, index: int, source: int) -> None:
        synchronise_buffers(self._runner, self._model, self._buffers, source)

    def _mirror_backward(self, index: int, source: int) -> None:
        for parameter in self._trainable.values():
            parameter.grad = None
        if self._gradients is not None:
            self._gradients.begin()
        self._end_backward()
        for parameter in self._trainable.values():
            parameter.grad = None

    def _announce_step(self, index: int) -> None:
        self._join.announce(Event.WEIGHTS, index)

    def _mirror_step(self, index: int, source: int) -> None:
        """The step of an optimizer that communicates by itself: its moments stay those of the others, its weights too if
        its rate does. Without gradients it says that it uses no parameter, and counts with zeros."""
        self._optimizers[index].step()

    def _mirror_weights(self, index: int, source: int) -> None:
        self._weights.land(index)
        self._weights.launch(index, self.step)

    def _conclude_join(self, last: int, uneven: bool) -> None:
        if self._gradients is not None:
            self._gradients.discarded.confirm(())
        if self._weights:
            return
        buffers = [] if self._buffers == "local" else named_buffers(self._model).values()
        same_from_rank(self._runner, [*self._parameters.values(), *buffers], last)
        if uneven and not self._links:  # those that communicate took their steps on all ranks
            for optimizer in self._optimizers:
                with changing(optimizer):
                    what = f"the state of {type(optimizer).__name__}"
                    optimizer.load_state_dict(dict(state_from_rank(self._runner, optimizer.state_dict(), last, what)))

    def _differing(self) -> Mapping[str, Tensor]:
        """The weights, where they are not the same on all ranks now."""
        return {} if self._closed or self._at_average else self._parameters

    def _refuse_in_join(self, what: str) -> None:
        if self._join.on:
            raise UsageError(
                f"{what} inside join(): a rank whose batches have ended would not take part; call it after the block"
            )

    def _require_own_weights(self, what: str) -> None:
        """Raise where the algorithm's state would not be that of the weights that the model has."""
        if self._closed:
            raise UsageError("the replica is closed")
        if self._at_average:
            raise UsageError(
                f"{what} inside consensus(): a replica's state belongs to the model's own weights, and not to the average; "
                "call it after the block"
            )
