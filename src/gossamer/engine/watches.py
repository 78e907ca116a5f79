"""Watches: what a user may change after ``replicate()`` that would silently not be exchanged.

The model and its parameters; the weights, by another optimizer; and what an optimizer keeps of each weight, where only the
weights themselves are exchanged. A second sequence of weights (schedule-free's z, Lookahead's slow weights) would not be
exchanged, and would pull each rank's weights away from the average. What is kept decides, and not the optimizer's name.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer

from gossamer.algorithms.base import Algorithm
from gossamer.comm.runner import Runner
from gossamer.engine.checks import release, replicated, they_are
from gossamer.engine.loop import Subscriber
from gossamer.engine.sharding import local, reshard
from gossamer.errors import UsageError
from gossamer.optim.communicating import Communicating
from gossamer.optim.gossip_adamw import AVERAGED_OVER

_logger = logging.getLogger("gossamer")

_again = "call replica.close() and gossamer.replicate() again after changing the model"

SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum", "exp_inf")
"""What torch's optimizers call sums, means and bounds of a gradient's squares or magnitudes, by which they divide."""

OF_GRADIENTS = (*SQUARES, "momentum_buffer", "exp_avg", "grad_avg", "acc_delta", "prev", "step_size")
"""What they call whatever they make of gradients."""

NEAR = 0.2
"""How far from the weights, relative to their size, a copy of them may be when it is first seen, one step after it was made."""

_MANY = 20
"""Gradients of one parameter without a step, after which its version is looked at."""


class ModelWatch(Subscriber):
    """Notices what would silently not be replicated: parameters added, replaced or unfrozen afterwards.

    The check runs at every optimizer step, so it only compares objects by identity, all in one comparison.
    """

    def __init__(self, model: nn.Module, optimizers: Sequence[Optimizer], parameters: Mapping[str, Parameter]) -> None:
        modules, self._model = dict(model.named_modules()), model
        self._places: list[dict[str, Any]] = [p for module in modules.values() for p in (module._parameters, module._modules)]
        self._paths = [path for path in modules for _ in range(2)]
        self._before, self._ids = [dict(place) for place in self._places], _ids(self._places)
        self._groups = [(optimizer, _held(optimizer)) for optimizer in optimizers]
        self._frozen = {name: p for name, p in parameters.items() if not p.requires_grad}
        communicating = any(isinstance(optimizer, Communicating) for optimizer in optimizers)
        self._not_to_freeze = {name: p for name, p in parameters.items() if communicating and p.requires_grad}
        self._names, self._own = list(parameters), list(parameters.values())
        self._dtypes, self._devices = _attributes("dtype", self._own), _attributes("device", self._own)
        for parameter in self._own:
            replicated[id(parameter)] = parameter

    def before_step(self, index: int, closure: bool) -> None:
        """Raise :class:`UsageError` if the model or an optimizer is not what was replicated."""
        if _ids(self._places) != self._ids:
            reshard(self._model)  # a forward pass after backward has left FSDP2's outermost parameters whole
        if _ids(self._places) != self._ids:
            rows = zip(self._paths, self._places, self._before, strict=True)
            changed = [(key, path) for path, now, old in rows for key in {**now, **old} if now.get(key) is not old.get(key)]
            if changed:  # and not only put in another order
                what, path = they_are([key for key, _ in changed], past=True), changed[0][1]
                where = f"module {path!r}" if path else "the model"
                raise UsageError(f"{what} added, replaced or removed in {where} after replicate(); {_again}")
        for optimizer, before_ids in self._groups:
            if _held(optimizer) != before_ids:
                raise UsageError(f"the parameters of {type(optimizer).__name__} changed after replicate(); {_again}")
        unfrozen = [name for name, parameter in self._frozen.items() if parameter.requires_grad]
        if unfrozen:
            raise UsageError(f"{they_are(unfrozen, past=True)} unfrozen after replicate(); {_again}")
        frozen = [name for name, parameter in self._not_to_freeze.items() if not parameter.requires_grad]
        if frozen:
            raise UsageError(f"{they_are(frozen, past=True)} frozen, with an optimizer that communicates by itself; {_again}")
        if _attributes("dtype", self._own) != self._dtypes or _attributes("device", self._own) != self._devices:
            before = zip(self._names, self._own, self._dtypes, self._devices, strict=True)
            name, p, dtype, device = next(row for row in before if (row[1].dtype, row[1].device) != row[2:])
            raise UsageError(f"parameter {name!r} moved from {dtype} on {device} to {p.dtype} on {p.device}; {_again}")

    def release(self) -> None:
        """The replica is closed; its parameters may be replicated again."""
        release(self._own)


def _held(optimizer: Optimizer) -> list[int]:
    return [id(parameter) for group in optimizer.param_groups for parameter in group["params"]]


def _ids(places: Sequence[dict[str, Any]]) -> list[int]:
    return list(map(id, chain.from_iterable(map(dict.values, places))))


def _attributes(name: str, objects: Sequence[Any]) -> list[Any]:
    return list(map(attrgetter(name), objects))


class UnsteppedWeights(Subscriber):
    """Watches one weight where only weights are exchanged: without steps of the optimizer nothing would be, silently."""

    def __init__(self, runner: Runner, weight: Parameter) -> None:
        self._rank, self._weight = runner.rank, weight
        self._gradients, self._version = 0, 0

    def hook(self) -> Any:
        """Install the hook; returns its handle."""
        return self._weight.register_post_accumulate_grad_hook(self._note)

    def _note(self, weight: Tensor) -> None:
        if self._gradients == 0:
            self._version = weight._version
        self._gradients += 1
        if self._gradients == _MANY and weight._version != self._version:
            _logger.warning(
                "rank %d: the weights have changed during %d backward passes, but the optimizer given to replicate() took "
                "no step, so nothing was exchanged; give it the optimizer whose step() is called", self._rank, _MANY
            )  # fmt: skip

    def before_step(self, index: int, closure: bool) -> None:
        self._gradients = 0


class StateWatch(Subscriber):
    """Looks at what each optimizer keeps when it has kept nothing like that before."""

    def __init__(
        self,
        runner: Runner,
        algorithm: Algorithm,
        optimizers: Sequence[Optimizer],
        owned: Sequence[Mapping[str, Parameter]],
    ) -> None:
        """``owned``: the parameters of each optimizer, by name."""
        self._runner, self._algorithm, self._optimizers, self._owned = runner, algorithm, optimizers, owned
        self._seen: list[tuple[tuple[str, ...], tuple[str, ...]] | None] = [None] * len(optimizers)
        """Of each, the names of what it kept of a parameter, and of its attributes."""
        self._told = False

    def after_step(self, index: int) -> None:
        """An optimizer has taken a step. Raises UsageError if it keeps a sequence of weights that will not be exchanged."""
        optimizer = self._optimizers[index]
        first = list(islice(optimizer.state.items(), 1))
        keys = tuple(str(key) for _, state in first for key in state)
        kept = (keys, tuple(vars(optimizer)))
        if kept == self._seen[index]:
            return
        travel: set[str] = set()
        if self._algorithm.traits.history and self._seen[index] is None:
            travel = {str(k) for p, state in first for k, v in state.items() if isinstance(v, Tensor) and v.shape == p.shape}
        self._seen[index] = kept
        for key, name in second_sequences(optimizer, self._owned[index]):
            if key not in travel:
                raise UsageError(
                    f"rank {self._runner.rank}: {type(optimizer).__name__} keeps a second sequence of weights ({key!r}, such "
                    f"as that of parameter {name!r}) which {self._algorithm!r} does not exchange: it would stay this rank's "
                    "own, without bound. Take an algorithm that averages gradients, or, where it is in the optimizer's state "
                    "from the first step on, GossipGraD(history=True)"
                )
        self._advise(optimizer, keys)

    def _advise(self, optimizer: Optimizer, keys: Sequence[str]) -> None:
        """Tell of what works, but worse than something else."""
        asks = any(AVERAGED_OVER in group for group in optimizer.param_groups)
        if self._told or asks or self._algorithm.traits.history or self._runner.rank != 0 or not set(keys) & set(SQUARES):
            return
        self._told = True
        _logger.warning(
            "%s divides by the size of this worker's own gradient, most of which may be noise that averaging would have "
            "removed: with %r, which averages weights, gossamer.optim.GossipAdamW learns faster",
            type(optimizer).__name__, self._algorithm
        )  # fmt: skip


def second_sequences(optimizer: Optimizer, parameters: Mapping[str, Parameter]) -> Iterator[tuple[str, str]]:
    """What an optimizer keeps that is near the weights: the key in its state or the name of its attribute, and a parameter of
    which it is kept. Not where it offers exact weights, which are exchanged in place of the parameters."""
    if hasattr(optimizer, "exact_weight"):
        return
    candidates: dict[str, dict[str, Tensor]] = {}
    others = {"step", *OF_GRADIENTS}
    for name, parameter in parameters.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            alike = [tensor for tensor in _tensors(value) if _is_like(tensor, parameter)]
            for number, tensor in enumerate(alike):
                candidates.setdefault(str(key) if number == 0 else f"{key}, {number}", {})[name] = tensor
            if not alike:  # a counter is like a parameter of one element, and like no other one
                others.add(str(key))
    candidates = {key: kept for key, kept in candidates.items() if key not in others}
    for key, value in vars(optimizer).items():
        for tensors in _sequences(value, parameters) if key not in _TORCHS_OWN else ():
            if all(_is_like(tensor, parameters[name]) for name, tensor in tensors.items()):
                candidates.setdefault(key, {}).update(tensors)
    for key, kept in candidates.items():
        if _near({name: parameters[name] for name in kept}, kept):
            yield key, next(iter(kept))


_TORCHS_OWN = ("state", "param_groups", "defaults")
"""Attributes of every optimizer: what is in its state is looked at by parameter."""


def _sequences(value: Any, parameters: Mapping[str, Parameter]) -> Iterator[dict[str, Tensor]]:
    """What an attribute keeps of all parameters, in their order: in containers, nested or not, or in one flat tensor."""
    tensors = list(_tensors(value))
    sizes = [parameter.numel() for parameter in parameters.values()]
    if len(tensors) == 1 and tensors[0].shape == (sum(sizes),):
        pieces = tensors[0].detach().split(sizes)
        tensors = [piece.view(p.shape) for piece, p in zip(pieces, parameters.values(), strict=True)]
    if len(tensors) == len(parameters):
        yield dict(zip(parameters, tensors, strict=True))
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _sequences(each, parameters)


def _tensors(value: Any) -> Iterator[Tensor]:
    """The tensors in a container of containers."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each)


def _is_like(tensor: Tensor, parameter: Parameter) -> bool:
    """Whether it could be another value of the parameter, in its shape, flat or as a matrix, and is not its memory."""
    own = tensor.is_floating_point() or tensor.is_complex()
    matrix = tensor.dim() == 2 and tensor.numel() == parameter.numel() > 1
    alike = matrix or tensor.shape in (parameter.shape, (parameter.numel(),))
    return own and alike and local(tensor).data_ptr() != local(parameter).data_ptr()


@torch.no_grad()
def _near(weights: Mapping[str, Tensor], kept: Mapping[str, Tensor]) -> bool:
    apart = size = 0.0
    for name, whole in weights.items():
        weight = local(whole)
        other = local(kept[name]).to(weight.device)
        ways = (other, other.mT) if other.dim() == 2 else (other,)
        apart += min(float(torch.linalg.vector_norm(way.reshape(weight.shape) - weight)) for way in ways) ** 2
        size += float(torch.linalg.vector_norm(weight)) ** 2
    return size > 0 and apart <= NEAR**2 * size
