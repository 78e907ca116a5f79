"""History: what an optimizer remembers of each weight, where that is exchanged together with the weights."""

import logging
from collections.abc import Callable, Mapping, Sequence, Set

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.bucket_plan import in_order, is_buffer
from gossamer.comm.calls import names
from gossamer.comm.ops import all_gather, maximum
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import agree, digest, values_of_all
from gossamer.engine.sharding import local
from gossamer.memory import as_real
from gossamer.pieces import OF, SQUARES

_logger = logging.getLogger("gossamer")

_COUNTERS = ("step",)


def history(optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The floating-point tensors in the optimizer's state that have one value per weight: ``"exp_avg of 0.weight"`` …; complex
    ones as views of their real numbers.

    Empty before the first step. An optimizer that keeps its state elsewhere offers ``exact_state(parameter)``.
    """
    state = getattr(optimizer, "exact_state", None) or (lambda parameter: optimizer.state.get(parameter, {}))
    return {
        f"{key}{OF}{name}": as_real(local(value))
        for name, parameter in parameters.items()
        for key, value in sorted(state(parameter).items())
        if isinstance(value, Tensor)
        and as_real(value).is_floating_point()
        and value.shape == parameter.shape
        and key not in _COUNTERS
    }


def skips(optimizer: Optimizer) -> bool:
    """Whether the optimizer leaves out the step that is being taken, because its ``GradScaler`` has found an overflow. (Others
    are not called then.)"""
    found = getattr(optimizer, "found_inf", None)
    return found is not None and float(found) > 0


def skipped_anywhere(runner: Runner, skipped: Callable[[], bool]) -> bool:
    """Whether a ``GradScaler`` has had any rank leave the step out. If it is the first one, nobody knows yet what will be
    remembered; asked until that is known. Collective."""
    if runner.world == 1:
        return False
    mine = torch.tensor([skipped()], dtype=torch.uint8)
    return bool(runner.run(lambda: maximum(mine, runner.world), "the question who skips the step").any())


_WHY_HISTORIES_DIFFER = (
    "It is known when every rank has taken a step: one that has had no batch before (in join()) remembers nothing. Give every "
    "rank one, or leave histories where they are (history=False)"
)


def agree_on_history(runner: Runner, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What the optimizers of all ranks remember; a warning names the parameters that had no gradient on some rank, of which
    each rank keeps its own. Collective.

    Raises:
        DisagreementError: one remembers nothing at all, or something lies in another order of memory there.
    """
    lines = {name: f"{name}, {list(in_order(t.shape, t.stride()))}" for name, t in tensors.items()}
    mine = torch.tensor([digest("\n".join(lines.values()))])
    digests = mine if runner.world == 1 else runner.run(lambda: all_gather(mine), "what the optimizer remembers")
    if bool((digests == mine).all()):
        return dict(tensors)
    everyone = values_of_all(runner, lines)
    common = [name for name in everyone[0] if all(name in row for row in everyone)]
    if not all(everyone) or any(row[name] != everyone[0][name] for row in everyone for name in common):
        agree(runner, {"what the optimizer remembers": "\n".join(lines.values()) or "nothing"}, _WHY_HISTORIES_DIFFER)
    if runner.rank == 0:
        _tell_of_own(everyone, set(common))
    return {name: tensor for name, tensor in tensors.items() if name in common}


def _tell_of_own(everyone: Sequence[Mapping[str, str]], common: Set[str]) -> None:
    """Say of which parameters the history is not known on all ranks, and where it is not."""
    known = [{weight_of(name) for name in row} for row in everyone]
    own = {weight_of(name): None for row in everyone for name in row if name not in common}
    where = {weight: [rank for rank, weights in enumerate(known) if weight not in weights] for weight in own}
    said = ", ".join(f"{weight!r} ({names(ranks)})" for weight, ranks in where.items())
    _logger.warning(
        "some parameters have had no gradient on some ranks when the first step was taken, so that the optimizer remembers "
        "nothing of them there: %s; what it remembers of them stays each rank's own (history=False leaves all of it there)",
        said,
    )


def weight_of(name: str) -> str:
    """The weight that something is remembered of; a weight's own name is its own."""
    return name.partition(OF)[2] or name


_VARIANCE = "running_var"


def variances(tensors: Mapping[str, Tensor]) -> list[Tensor]:
    """The running variances of modules among them."""
    return [tensor for name, tensor in tensors.items() if is_buffer(name) and name.rpartition(".")[2].startswith(_VARIANCE)]


def halve_at_most(tensors: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """Where ``tensors`` have become negative, half of what was there ``before`` stays.

    A difference to what was sent may be larger than what is left of it, if many forward passes lie between.
    """
    for tensor, was in zip(tensors, before, strict=True):
        tensor.copy_(torch.where(tensor < 0, was / 2, tensor))


def keep_squares_valid(tensors: Mapping[str, Tensor]) -> None:
    """Raise what has become negative among means of squares to zero: their root is taken."""
    squares = [tensor for name, tensor in tensors.items() if OF in name and name.partition(OF)[0] in SQUARES]
    if squares:
        torch._foreach_clamp_min_(squares, 0.0)
    for name, mean in tensors.items():
        key, _, of = name.partition(OF)
        if key == "grad_avg" and (square := tensors.get(f"square_avg{OF}{of}")) is not None:
            square.copy_(torch.maximum(square, mean * mean))  # RMSprop(centered=True) takes the root of their difference
