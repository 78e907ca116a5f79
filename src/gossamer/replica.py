"""Replica: the handle on a replicated model; it drives the flows from the hooks of the training loop."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import alarming
from gossamer.engine import checkpoint, joining, mixing, switching
from gossamer.engine.assembly import Parts, disassemble
from gossamer.engine.averages import Averages
from gossamer.engine.tracing import Traced
from gossamer.engine.weighing import Weighed
from gossamer.errors import UsageError


class Replica(Traced, Weighed):
    """What :func:`gossamer.replicate` returns. The model itself is unchanged and is used as before.

    ``step`` counts the synchronised backward passes; ``algorithm`` is what was chosen.
    """

    def __init__(self, parts: Parts) -> None:
        self._runner, self._loop, self._closed = parts.runner, parts.loop, False
        self._adopt(parts)

    def _adopt(self, parts: Parts) -> None:
        self.algorithm: Algorithm = parts.algorithm
        self._parts, self._averages = parts, Averages(parts)
        self._weights, self._gradients, self._overlap = parts.weights, parts.gradients, parts.overlap
        if self._weights and self._runner.world > 1:
            mixing.refuse_for(self._differing, self._runner.rank)

    @property
    def step(self) -> int:
        """The number of synchronised backward passes; where only weights are exchanged, of steps of the first optimizer."""
        if self._gradients is not None:
            return self._gradients.step
        return self._weights[0].steps if self._weights else self._loop.steps[0]

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside accumulate gradients locally; the first one outside communicates the sum.

        While ``model.require_backward_grad_sync`` is set to False, as scripts for DDP do it, a backward pass is one inside.
        The model gets no ``no_sync`` of its own: it stays what it was.
        """
        before, self._loop.synchronise = self._loop.synchronise, False
        try:
            yield
        finally:
            self._loop.synchronise = before

    def synchronize(self) -> None:
        """Exchange the gradients that passes have accumulated since the last exchange, if any have. Collective.

        With ``synchronize="step"`` the optimizer's step begins with it; call it before, where gradients are clipped or logged.
        """
        if self._gradients is not None and self._loop.ended_apart:
            with alarming(self._runner):
                self._loop.pass_without_gradients()

    @contextmanager
    def join(self, *, divide_by_initial_world_size: bool = True, throw_on_early_termination: bool = False) -> Iterator[None]:
        """Train inside when ranks may have different numbers of batches; every rank enters.

        A rank that leaves the block early goes on answering the others (with zero gradients, which count in the mean
        over all ranks, or with its weights as they are) until all have left. The model then is that of the ranks that
        trained to the end, and so is, where gradients are exchanged, what the optimizer remembers (not the state of a
        scheduler). Costs one small message per exchange. An optimizer that communicates by itself (``OneBitAdam``)
        goes on taking its steps there, without gradients. Where some have left early, the others' optimizers are sent to them
        (numbers, strings and tensors; one that keeps anything else is refused). Not with a ``scaler=``, nor where gradients and
        weights both move (``Hierarchical(Gossip())``, ``after``).

        As for DDP: ``divide_by_initial_world_size=False`` makes gradients the mean over the ranks that still train, and
        ``throw_on_early_termination=True`` raises a :class:`UsageError` on all ranks once one of them has left the block and
        another begins a further step.
        """
        joining.refuse(self._parts, divide_by_initial_world_size)
        self._come_together("join()")
        conclude = partial(joining.conclude, self._parts)
        active = self._parts.join.active(conclude, divide_by_initial_world_size, throw_on_early_termination)
        with alarming(self._runner), active:
            yield

    @contextmanager
    def consensus(self, *beside: nn.Module) -> Iterator[nn.Module]:
        """Inside, the model holds the average of all replicas (to evaluate or save it); afterwards its own weights.

        Collective: every rank enters. For gradient algorithms the replicas are equal, and only buffers are brought together
        (those of rank 0, or their mean, as ``buffers`` says), and stay so. Parameters that were frozen when the replica was
        made are left as they are. The average is the one that ``close(average=True)`` would leave now, of the weights with what
        their last exchange brought. It may be nested, and left by an exception; steps inside are refused.
        ``beside``: other modules that hold their average inside: a moving average of the weights (``AveragedModel``), say.
        """
        if self._runner.world == 1:
            yield self._parts.model
            return
        if self._averages.on or not self._weights:
            if not self._averages.on and not self._parts.join.on:
                self._come_together("consensus()")
            self._averages.bring_buffers_together()
            with self._averages.of(beside):
                yield self._parts.model
            return
        joining.refuse_inside(self._parts, "consensus()")
        self._come_together("consensus()")
        self.wait_for_exchanges()
        with self._averages.inside(), self._averages.of(beside):
            yield self._parts.model

    def consensus_distance(self) -> float:
        """How far the replicas are apart now: the root mean square over workers of ‖w − w̄‖ / ‖w̄‖, w̄ the mean of the weights
        (without parameters that were frozen when the replica was made).

        Zero for gradient algorithms, unless something has gone wrong, and inside :meth:`consensus`. Collective, and costs an
        all-reduce of the weights (a checksum where they are equal, and gradients travel): for now and then.
        """
        if self._runner.world == 1 or self._averages.on:
            return 0.0
        joining.refuse_inside(self._parts, "consensus_distance()")
        self._come_together("consensus_distance()")
        self.wait_for_exchanges()
        return self._averages.distance()

    def catch_up(self) -> None:
        """Where exchanges may lag (``lag=``): wait until every rank is here and all have taken part in the same ones.

        Collective. Call it before the ranks wait for each other in any other way (a barrier, a mean of losses): a rank that
        waits there takes part in no exchange. The methods of a replica call it by themselves.
        """
        if self._weights.may_be_apart:
            self._come_together("catch_up()")

    def _come_together(self, call: str) -> None:
        """Wait until all ranks have made this call. Where no gradients are averaged (any more), ranks may have taken part in
        different numbers of exchanges, and those behind take part in what they missed (inside :meth:`join` none is behind)."""
        alone = self._gradients is None or self._gradients.ended(self._gradients.step)
        apart = bool(self._weights) and alone and self._runner.world > 1 and not self._parts.join.on
        with alarming(self._runner):
            if self._weights.may_be_apart:
                self._weights.catch_up(call, self._averages.on)
            elif apart:
                self._weights.even_out(call, self._loop.steps, self._gradients)
            else:
                self._runner.meet(call)

    def answer(self) -> bool:
        """Where exchanges may lag: take part in one more, if it can begin without waiting; whether it did. Between steps.

        For a loop that waits for other ranks in its own way: calling this meanwhile lets the others go on.
        ``RingShuffle(…, replica=replica)`` does.
        """
        if self._closed or self._averages.on or not self._weights.may_be_apart:
            return False
        with alarming(self._runner):
            return self._weights.answer()

    def wait_for_exchanges(self) -> None:
        """Wait until no exchange is under way. What weights brought is added before the next update, as always; updates that
        the next forward pass would take (``overlap_forward``) are taken now.

        Collective where exchanges may lag.
        """
        if self._overlap is not None:
            self._overlap.complete()
        self.catch_up()
        for sync in self._weights:
            sync.arrive()

    def metrics(self) -> dict[str, float]:
        """What this rank has counted: totals since the start, and the same of the last step under the name with
        ``_last_step`` behind it (from the end of one step of the first optimizer to the end of its next one).

        ``bytes_sent``, ``messages_sent``: payload handed to the transport. ``exposed_seconds``: the loop stood still for
        communication. ``wire_seconds``, ``local_seconds``: lanes waited for the network; computed. ``elapsed_seconds``.

        Besides: ``step``; ``compression_ratio``, the bytes that an exact all-reduce of the gradients in every step of an
        optimizer would have sent, divided by ``bytes_sent``; as of now, ``residual_norm``, the L2 norm of what is unsent, over
        that of the last exchange; with ``DiLoCo(outlier=…)``, ``left_out``: this rank's outer deltas left out, by bucket."""
        shares = [sync.exchange.states.residual_share() for sync in self._weights]
        shares += [link.residual_share() for link in self._parts.links]
        if self._gradients is not None:
            shares.append(self._gradients.residual_share())
        return self._parts.statistics.read(self.step, shares) | self._weights.left_out()

    def switch(self, algorithm: Algorithm) -> None:
        """Go on with another algorithm from the next step on. Collective, between two steps.

        Unsent gradients (residuals) travel in the next exchange. Replicas that differ go on from their average where the next
        algorithm needs equal ones, or counts them otherwise. A refused algorithm (ConfigurationError) changes nothing. There is
        no dense start here, also not for the choice of a plan: its predicted steps are those without one.
        """
        self._require_own_weights("switch()")
        self._adopt(switching.switch(self._parts, algorithm, self._come_together, lambda: self.step, self._averages.become))

    def state_dict(self) -> dict[str, Any]:
        """Plan, counters and the algorithm's state of this rank, under a key with its rank.

        Collective, between steps and outside of :meth:`consensus`: the state belongs to the rank's own weights.
        """
        self._require_own_weights("state_dict()")
        self._parts.unsent.refuse("state_dict()")
        self._come_together("state_dict()")
        if self._overlap is not None:
            self._overlap.conclude()
        if self._gradients is not None:
            self._gradients.keep_used()
        weights = checkpoint.fingerprint(self._parts.parameters.values()) if self._weights else ""
        syncs = [*self._weights, *self._parts.links]
        if not self._parts.join.on:
            self._averages.check_equal()
        state = checkpoint.collect(self._runner, self.algorithm, self.step, self._gradients, syncs, weights)
        return checkpoint.of_part(state | {"scale": self._parts.scale.saved()}, self._runner.part)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put back what :meth:`state_dict` returned on this rank. Collective.

        Load the optimizer first, before :func:`gossamer.replicate`; then the model, because ``replicate()`` copies rank 0's
        weights to all ranks; then this. Where weights travel, a warning tells if they are not those of the saved state.

        With another number of ranks give every rank the merged dictionaries of all old ones: what was not sent yet is
        summed and shared out (its mean stays), what has come for a model's weights goes on with it, and a warning says so.
        """
        self._require_own_weights("load_state_dict()")
        self._come_together("load_state_dict()")
        state = checkpoint.from_part(state, self._runner.part)
        with alarming(self._runner):
            syncs = [*self._weights, *self._parts.links]
            if self._overlap is not None:
                self._overlap.conclude()
                self._overlap.drop()
            model = self._parts.parameters.values()
            step = checkpoint.restore(state, self._runner, self.algorithm, self._gradients, syncs, model)
            self._loop.steps = [step] * len(self._parts.optimizers)
            if checkpoint.has_other_nodes(state, self._runner, self.algorithm):
                switching.make_equal(self._parts, self._averages.become)
            self._parts.scale.load(state.get("scale"))
            if self._overlap is not None:
                self._overlap.restart()

    def close(self, average: bool = False) -> None:
        """Add what is still under way, remove all hooks and leave. The model stays usable, alone.

        ``average``: it then holds the average of all replicas, the model of the whole run. Every rank closes with it; for
        gradient algorithms, whose replicas are to be equal, all parameters are compared.

        Without it a rank may close alone: the others are told in their next exchange. Collective where exchanges may lag
        (``lag=``): a rank that fails had better end without it, so that the others are told.

        Raises:
            UsageError: inside :meth:`consensus`, whose end would undo it.
            DisagreementError: on every rank, if replicas that are to be equal have parted: the first parameter that differs,
                and on which ranks. The replica is closed all the same.
        """
        if self._closed:
            return
        if self._averages.on:
            raise UsageError("close() inside consensus() would be undone at its end: close the replica after that block")
        self._closed = True
        try:
            if self._overlap is not None:
                self._overlap.leave()
        finally:
            self._release(average)

    def _release(self, average: bool) -> None:
        disassemble(self._parts)
        try:
            if average and sys.exc_info()[0] is None:
                self._come_together("close(average=True)")
            elif self._weights.may_be_apart:
                self._come_together("close()")
            self._weights.conclude(alone=not average)
            if average:
                self._averages.become()
            if average and sys.exc_info()[0] is None:
                self._averages.check_equal()
        finally:
            if self._parts.ignored is not None:
                self._parts.ignored.release()
            self._runner.close()

    def _differing(self) -> Mapping[str, Tensor]:
        """The weights, where they are not the same on all ranks now."""
        return {} if self._closed or self._averages.on or not self._weights else self._parts.parameters

    def _require_own_weights(self, what: str) -> None:
        """Raise where the algorithm's state would not be that of the weights that the model has."""
        if self._closed:
            raise UsageError("the replica is closed")
        if self._averages.on:
            raise UsageError(
                f"{what} inside consensus(): a replica's state belongs to the model's own weights, and not to the average; "
                "call it after the block"
            )
