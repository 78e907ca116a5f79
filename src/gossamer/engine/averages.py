"""Averages: the average of a replica and all others in its model, their distance, and whether they are equal."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn

from gossamer.engine import joining
from gossamer.engine.agreement import agree
from gossamer.engine.assembly import Parts
from gossamer.engine.checks import named_buffers
from gossamer.engine.consensus import at_average, become_average, check_equal, distance, equal
from gossamer.engine.loop import Subscriber
from gossamer.engine.module_buffers import beside_parameters, floating, synchronise_buffers
from gossamer.engine.sharding import is_sharded, local_of, reshard
from gossamer.engine.ties import once, ties
from gossamer.errors import UsageError


class Averages:
    """What is asked of all replicas of one model together. Collective, while no exchange is under way."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._runner, self._weights = parts, parts.runner, parts.weights
        self.on = False
        """Whether the model holds the average now, in place of its own weights."""

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Inside, the model holds the average of the weights of all replicas, and no step may be taken."""
        parts = self._parts
        self._agree_on_buffers()
        tensors = once({**floating(parts.trainable), **beside_parameters(parts.model)})
        self.on = True
        reshard(parts.model)
        try:
            with parts.loop.including(NoStep()), at_average(self._runner, parts.optimizers, tensors, self._weights.weigh):
                yield
        finally:
            reshard(parts.model)
            self.on = False

    @contextmanager
    def of(self, modules: Sequence[nn.Module]) -> Iterator[None]:
        """Inside, these modules hold the averages over all ranks of their parameters and buffers."""
        if not modules:
            yield
            return
        tensors = [{**dict(each.named_parameters()), **dict(each.named_buffers())} for each in modules]
        named = {f"{number}: {name}": tensor for number, each in enumerate(tensors) for name, tensor in each.items()}
        agree(
            self._runner, {"the modules beside the model": "\n".join(f"{name}: {list(t.shape)}" for name, t in named.items())}
        )
        with at_average(self._runner, (), once(floating(named)), lambda copies: None):
            yield

    def become(self) -> None:
        """Leave the average in the model; where gradients are exchanged, only buffers may differ from it."""
        parts = self._parts
        if self._weights and self._runner.world > 1:
            self._agree_on_buffers()
            beside = beside_parameters(parts.model)
            become_average(self._runner, parts.optimizers, parts.trainable, beside, self._weights.weigh)
            reshard(parts.model)
        else:
            self.bring_buffers_together()

    def distance(self) -> float:
        """How far the replicas are apart: see :meth:`gossamer.Replica.consensus_distance`."""
        tensors: dict[str, Tensor] = dict(self._parts.trainable)
        parted = any(map(is_sharded, tensors.values()))  # then all parts are asked, or none
        if not self._weights and not parted and equal(self._runner, floating(tensors)):
            return 0.0
        weigh = partial(self._weights.weigh, arrived=False)
        tied = ties(local_of(tensors)) if self._weights else {}
        return distance(self._runner, {name: t for name, t in tensors.items() if name not in tied}, weigh)

    def bring_buffers_together(self) -> None:
        """Where gradients are exchanged: before the model is used outside of training, so that it is one model on all ranks."""
        parts = self._parts
        if not self.on and parts.buffers != "local" and self._runner.world > 1 and named_buffers(parts.model):
            joining.refuse_inside(parts, "consensus() of a model with buffers")
            if parts.overlap is not None:
                parts.overlap.complete()
            self._agree_on_buffers()
            synchronise_buffers(self._runner, parts.model, parts.buffers)

    def _agree_on_buffers(self) -> None:
        """Raise DisagreementError unless all ranks have the same buffers, but for their values."""
        lines = [f"{name}: {buffer.dtype} {list(buffer.shape)}" for name, buffer in named_buffers(self._parts.model).items()]
        hint = "What is changed after replicate() must be changed alike on all ranks; leave to each what is its own (ignore=)"
        agree(self._runner, {"the buffers": "\n".join(lines)}, hint)

    def check_equal(self) -> None:
        """Raise DisagreementError unless replicas are equal in what they are to be equal in: where weights are exchanged, in
        what is not trained; never in buffers, which change in every forward pass."""
        gradients, trainable = self._parts.gradients, self._parts.trainable
        parted = bool(self._weights) or (gradients is not None and gradients.parts_replicas)
        there = {name: p for name, p in self._parts.parameters.items() if not p.is_meta}
        alike = {name: p for name, p in there.items() if name not in trainable} if parted else there
        if alike and self._runner.world > 1:
            check_equal(self._runner, alike)


class NoStep(Subscriber):
    """Refuses steps inside ``consensus()``."""

    def before_step(self, index: int, closure: bool) -> None:
        raise UsageError("optimizer.step() inside replica.consensus(): the model's own weights come back after it")
