"""Consensus: the average of all replicas, for a while in place of each, and how far they are from it."""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.comm.ops import all_gather
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import agree, checksum, digest
from gossamer.engine.checks import held_by, they_are
from gossamer.engine.exact import changing, exact
from gossamer.engine.module_buffers import average, floating
from gossamer.engine.sharding import local, sum_of_parts
from gossamer.engine.ties import once
from gossamer.errors import DisagreementError
from gossamer.memory import widened

_logger = logging.getLogger("gossamer")

Weigh = Callable[[Mapping[str, Tensor]], None]
"""Makes of tensors, by name, what their mean over the ranks is made of: see ``weight_syncs.weigh``."""

WHAT = "the average of the replicas"

ROUNDING = 1e-4
"""A distance up to which replicas may differ because machines of several kinds round differently."""


@contextmanager
def at_average(runner: Runner, optimizers: Iterable[Optimizer], tensors: Mapping[str, Tensor], weigh: Weigh) -> Iterator[None]:
    """Inside, ``tensors`` hold their average over all ranks; afterwards what they were. Collective.

    What optimizers keep of them in more bits follows them when a state is saved inside, and would come back rounded.
    """
    copies = [local(copy.detach()) for each in optimizers for p in held_by(each) if (copy := exact(each, p)) is not p]
    kept = [copy.clone() for copy in copies]
    places = {name: tensor.detach() for name, tensor in tensors.items()}
    own = [place.clone() for place in places.values()]
    try:
        _name_broken(runner, places)
        weigh(places)
        average(runner, list(places.values()), WHAT)
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_([*places.values(), *copies], [*own, *kept])


def _name_broken(runner: Runner, tensors: Mapping[str, Tensor]) -> None:
    """Tell, on the rank that has it, of what makes the average NaN."""
    broken = [name for name, tensor in tensors.items() if tensor.device.type != "meta" and not tensor.isfinite().all()]
    if broken:
        _logger.warning(
            "rank %d: %s not finite, so that %s is not either: load the weights of another rank into its model, or resume all "
            "from a checkpoint", runner.rank, they_are(broken), WHAT
        )  # fmt: skip


@torch.no_grad()
def become_average(
    runner: Runner,
    optimizers: Iterable[Optimizer],
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    weigh: Weigh,
) -> None:
    """Make parameters, where an optimizer keeps them exactly those, and ``buffers`` the average over all ranks. Collective."""
    with ExitStack() as stack:
        kept: dict[int, Tensor] = {}
        for optimizer in optimizers:
            stack.enter_context(changing(optimizer))
            kept |= {id(parameter): exact(optimizer, parameter) for parameter in held_by(optimizer)}
        places = floating({name: kept.get(id(parameter), parameter).detach() for name, parameter in parameters.items()})
        travelling = once({**places, **buffers})
        _name_broken(runner, travelling)
        weigh(travelling)
        average(runner, list(travelling.values()), WHAT)


@torch.no_grad()
def distance(runner: Runner, tensors: Mapping[str, Tensor], weigh: Weigh) -> float:
    """The root mean square over ranks of ‖w − w̄‖ / ‖w̄‖, w̄ the mean of ``tensors`` over them. Collective; of sharded tensors
    also over the ranks that have the other parts."""
    own = {name: tensor.detach() for name, tensor in floating(tensors).items()}
    means = {name: tensor.to(widened(tensor.dtype), copy=True) for name, tensor in own.items()}
    weigh(means)
    average(runner, list(means.values()), WHAT)
    apart = {name: _square(own[name] - mean) for name, mean in means.items()}
    average(runner, list(apart.values()), WHAT)
    whole = sum_of_parts({name: _square(mean) for name, mean in means.items()}, tensors)
    return math.sqrt(sum_of_parts(apart, tensors) / whole) if whole else 0.0


def _square(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float64)
    return norm.square()


def equal(runner: Runner, tensors: Mapping[str, Tensor]) -> bool:
    """Whether all ranks hold the same bits. Collective."""
    mine = torch.tensor([digest(contents(tensors))], dtype=torch.int64)
    return len(set(runner.run(lambda: all_gather(mine), "the comparison of replicas").flatten().tolist())) == 1


def check_equal(runner: Runner, tensors: Mapping[str, Tensor]) -> None:
    """Look whether all ranks hold the same ``tensors``, as they should. Collective. Differences of rounding are warned of.

    Raises:
        DisagreementError: on every rank, with the first that differs, and on which ranks.
    """
    hint = (
        "They are to be equal: what is changed after replicate(), by loading weights, by hand, or by a module in its forward "
        "pass (max_norm=), must be changed alike on all ranks; leave to each rank what is its own (ignore=)"
    )
    try:
        agree(runner, {"the values of parameters": contents(tensors)}, hint)
    except DisagreementError as error:
        some = floating(tensors)
        apart = distance(runner, some, lambda copies: None) if some else math.inf
        if not 0 < apart <= ROUNDING:
            raise
        _logger.warning("%s (so far by %.1g of their size, which may be rounding)", error, apart)


def contents(tensors: Mapping[str, Tensor]) -> str:
    """A line for each tensor, equal where its bits are."""
    return "\n".join(f"{name}: {checksum([tensor])[:16]}" for name, tensor in tensors.items())
