"""GossipAdamW: AdamW for workers who average their weights, and not their gradients.

Tried on the GPT with 4 and 16 workers, and left out: exchanging momentum and variance (slower), the exact size of the mean
gradient from an all-reduce in every tenth step (no better, a fifth more bytes), a variance that is frozen after 50 exact steps
(worse), and adding averages inside the loop of the update (as much processor time as without, for 385 lines).
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import chain, compress
from operator import attrgetter, is_
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from gossamer.checks import is_whole
from gossamer.errors import ConfigurationError
from gossamer.optim.adam import adam_steps, check_adam
from gossamer.optim.loan import give_back, save_as_given
from gossamer.optim.parts import own, placed_as
from gossamer.optim.wide import Wide


class GossipAdamW(Wide):
    """AdamW which divides by the size that the *mean* gradient of all workers has, and not by that of a worker's own.

    An all-reduce averages the noise of p workers' gradients before Adam takes its root; where weights are averaged, every
    worker divides by its own noise, which is √p times as large, and learns too slowly wherever noise is more than signal.
    A worker cannot see the mean gradient, but its size. Of its own g = s + noise of variance σ², the square is s² + σ² on
    average; that of its momentum, which has averaged the noise of many steps, s² + c·σ²; a share a of the one and 1 − a of
    the other make what the mean gradient's is, s² + σ²/p. With gradient g, at the t-th update::

        m ← β₁·m + (1 − β₁)·g                                   m̂ = m / (1 − β₁ᵗ)
        c = (1 − β₁)/(1 + β₁) · (1 + β₁ᵗ)/(1 − β₁ᵗ)             a = max(0, (1/p − c)/(1 − c))
        v ← β₂·v + (1 − β₂)·(a·g² + (1 − a)·m̂²)                v̂ = v / (1 − β₂ᵗ)
        w ← w − lr·(m̂ / (√v̂ + eps) + weight_decay·w)

    (a = 1 where c = 1, in the first update.) Nothing is communicated for it. Where p is so large that the momentum has more
    noise than the mean gradient (20 and more with β₁ = 0.9, and fewer in the first steps), that of the momentum counts: the
    divisor is, on average, no smaller than what it divides. Where gradients are rare, or change their sign in every step,
    a worker's own step may be several times AdamW's (at most p); the mean of the workers has 1/p of it. With p = 1 this
    is AdamW. Measured with 4 and 16 workers.

    Args:
        params: parameters or groups; every option may differ between groups.
        lr: learning rate.
        betas: β₁ and β₂.
        eps: added to the root.
        weight_decay: decoupled, as in AdamW.
        averaged_over: p. :func:`gossamer.replicate` sets it in every step: the number of workers for algorithms that move
            weights, that of machines for one inside :class:`Hierarchical`, 1 where gradients are averaged. ``close()`` puts
            back what it was, and that is what ``state_dict()`` holds.

    Not the choice for SGD's models (momentum is linear in the gradient, so it does not matter when it is averaged), nor where
    gradients are averaged: it is AdamW then. Nor with ``GossipGraD(history=True)``, which averages momenta themselves: they
    have less noise than is assumed here. On the CPU it takes one pass over memory, elsewhere
    several.

    Raises:
        ConfigurationError: an option out of its range.

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101) for AdamW; the size of the mean gradient is ours.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        averaged_over: int = 1,
    ) -> None:
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, AVERAGED_OVER: averaged_over}
        self._places: dict[int, _Places] = {}
        super().__init__(params, options)
        own = [parameter for group in self.param_groups for parameter in group["params"] if parameter.is_cpu]
        for kind in {np.float64 if parameter.dtype == torch.float64 else np.float32 for parameter in own}:
            _compile(kind)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with options of their own. Raises ConfigurationError for options out of range."""
        options = self.defaults | param_group
        check_adam(options)
        workers = options[AVERAGED_OVER]
        if not is_whole(workers, 1):
            raise ConfigurationError(f"{AVERAGED_OVER} must be a number of workers, at least 1; got {workers!r}")
        super().add_param_group(param_group)

    def __getstate__(self) -> dict[str, Any]:
        """Of a copy, which trains alone."""
        groups = [dict(group) for group in self.param_groups]
        give_back(groups, _LOAN)
        return {**super().__getstate__(), "param_groups": groups}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._places = {}
        super().__setstate__(state)

    def change(self, group: Mapping[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        counts = self.count()
        columns = parameters, gradients, self.remembered("exp_avg", parameters), self.remembered("exp_avg_sq", parameters)
        if not set(map(type, parameters)) <= _PLAIN:
            columns = _own_parts(columns)
        if (places := self._places_of(columns)) is not None and places.fit(gradients):
            _in_one_pass(group, places, gradients, counts)
            return
        whole = [row[0].is_cpu and _alike_and_whole([[tensor] for tensor in row]) for row in zip(*columns, strict=True)]
        if any(whole):
            chosen = _chosen(columns, whole)
            _in_one_pass(group, _Places(chosen), chosen[1], list(compress(counts, whole)))
        others = [not each for each in whole]
        if any(others):
            _together(group, _chosen(columns, others), list(compress(counts, others)))

    def _places_of(self, columns: "Columns") -> "_Places | None":
        """Where these tensors lie, if they are alike and whole, and on the host."""
        weights = columns[0]
        key, on_host = id(weights[0]), weights[0].is_cpu
        places = self._places.get(key)
        if on_host and places is not None and places.are_of(columns):
            return places
        self._places.pop(key, None)
        if not on_host or not _alike_and_whole(columns):
            return None
        places = _Places(columns)
        if all(map(_requires_grad, weights)):  # and not copies of 16-bit ones
            self._places[key] = places
        return places


Columns = Sequence[list[Tensor]]
"""Weights, their gradients, and the means of gradients and of squares."""


_dtype, _shape, _requires_grad = attrgetter("dtype"), attrgetter("shape"), attrgetter("requires_grad")


_PLAIN = {Tensor, torch.nn.Parameter}


def _own_parts(columns: "Columns") -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """What this rank holds of sharded tensors: each element is updated by itself, wherever the others are."""
    weights, gradients, means, squares = columns
    placed = [placed_as(gradient, weight) for gradient, weight in zip(gradients, weights, strict=True)]
    return own(weights), own(placed), own(means), own(squares)


def _alike_and_whole(columns: Columns) -> bool:
    """Whether all are of one dtype and without gaps in memory, those of a weight in its shape. A hot path, without a line of
    Python for each weight."""
    everything = list(chain.from_iterable(columns))
    first, *others = [list(map(_shape, column)) for column in columns]
    return (
        all(map(Tensor.is_contiguous, everything))
        and len(set(map(_dtype, everything))) == 1
        and all(shapes == first for shapes in others)
    )


def _chosen(columns: Columns, which: Sequence[bool]) -> Columns:
    return [list(compress(column, which)) for column in columns]


def _compile(kind: type[np.floating[Any]]) -> None:
    """Compile the loop, or load it where it is compiled already: now, and not amid the first step, for which others wait."""
    from gossamer.optim.loops import adamw

    adamw(np.zeros((4, 0), np.int64), np.zeros(0, np.int64), np.zeros((0, 4), kind), (kind(0),) * 5)


class _Places:
    """Where weights, and the means of their gradients and of squares, lie that are :func:`_alike_and_whole`: mostly where they
    were in the step before, and then nobody need look again."""

    def __init__(self, columns: Columns) -> None:
        weights, _, means, squares = columns
        self.weights, self._held = weights, [*weights, *means, *squares]
        self._found = list(map(Tensor.data_ptr, self._held))
        self._numels = list(map(Tensor.numel, weights))
        self.weight, self.mean, self.square = np.array(self._found, np.int64).reshape(3, -1)
        self.sizes = np.array(self._numels, np.int64)

    def are_of(self, columns: Columns) -> bool:
        """Whether these are the same tensors, in the same memory."""
        weights, _, means, squares = columns
        held = [*weights, *means, *squares]
        same = len(held) == len(self._held) and all(map(is_, held, self._held))
        # A weight may be turned (``.data = .data.t()``) without being moved.
        return same and list(map(Tensor.data_ptr, held)) == self._found and all(map(Tensor.is_contiguous, weights))

    def fit(self, gradients: list[Tensor]) -> bool:
        """Whether gradients, which are new in each step, go with them."""
        return (
            all(map(Tensor.is_contiguous, gradients))
            and set(map(_dtype, gradients)) == {self.weights[0].dtype}
            and list(map(Tensor.numel, gradients)) == self._numels
        )


def _in_one_pass(group: Mapping[str, Any], places: _Places, gradients: list[Tensor], counts: Sequence[int]) -> None:
    """Tensors of one dtype without gaps in the host's memory, in one pass over it. ``counts``: the numbers of these updates."""
    from gossamer.optim.loops import adamw

    (first, second), lr = group["betas"], group["lr"]
    kind = np.float64 if places.weights[0].dtype == torch.float64 else np.float32
    rates = 1 - first, second, 1 - lr * group["weight_decay"], lr, group["eps"]
    gradient = np.array(list(map(Tensor.data_ptr, gradients)), np.int64)
    factors = {}
    for count, share in _shares(group, set(counts)).items():
        part = (1 - second) * share
        factors[count] = 1 / (1 - first**count), 1 / (1 - second**count), part, 1 - second - part
    each = np.array(list(factors.values()), kind)
    if len(factors) > 1:
        rows = {count: row for row, count in enumerate(factors)}
        each = each[[rows[count] for count in counts]]
    addresses = np.stack([places.weight, gradient, places.mean, places.square])
    adamw(addresses, places.sizes, np.broadcast_to(each, (len(gradients), 4)).copy(), tuple(map(kind, rates)))
    increment_version(places.weights)  # autograd does not see what is written to an address


def _together(group: Mapping[str, Any], columns: Columns, counts: Sequence[int]) -> None:
    """All tensors operation by operation."""
    weights, gradients, means, squares = columns
    shares = _shares(group, set(counts))
    steps = adam_steps(group, means, squares, gradients, counts, shares=[shares[count] for count in counts])
    torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(weights, steps, alpha=-group["lr"])


def _shares(group: Mapping[str, Any], counts: Iterable[int]) -> dict[int, float]:
    """How much of v a gradient's square has, at updates of these numbers: a in the formula."""
    first, workers = group["betas"][0], group[AVERAGED_OVER]

    def share(count: int) -> float:
        left = (1 - first) / (1 + first) * (1 + first**count) / (1 - first**count)
        # In the first update (and in all without momentum) m̂ is the gradient, and any share is the same.
        return 1.0 if count == 1 or left >= 1 else max(0.0, (1 / workers - left) / (1 - left))

    return {count: share(count) for count in counts}


AVERAGED_OVER = "averaged_over"
"""The group option in which an optimizer is told of how many gradients the mean update is made."""

_ALONE = "averaged_over without gossamer"
"""The key in a param group of what that was before."""

_LOAN = {AVERAGED_OVER: _ALONE}

_saving: "WeakSet[Optimizer]" = WeakSet()
"""Optimizers that were told, and save what they had before."""


def tell_how_many(optimizer: Optimizer, workers: Callable[[], int], own: Collection[int] | None = None) -> None:
    """Write into the groups that ask for it of how many gradients the mean update is made. ``own``: the ids of the parameters
    of which that is known; other groups may be another replica's."""
    for group in optimizer.param_groups:
        if AVERAGED_OVER in group and (own is None or any(id(p) in own for p in group["params"])):
            if optimizer not in _saving:
                save_as_given(optimizer, _LOAN)
                _saving.add(optimizer)
            group.setdefault(_ALONE, group[AVERAGED_OVER])
            group[AVERAGED_OVER] = workers()


def stop_telling(optimizer: Optimizer) -> None:
    """Undo :func:`tell_how_many`."""
    give_back(optimizer.param_groups, _LOAN)
