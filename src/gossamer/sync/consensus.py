"""Consensus: the average of all replicas, for a while in place of each, and how far they are from it."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from gossamer.algorithms.lossy import wide
from gossamer.comm.runner import Runner
from gossamer.sync.checks import held_by
from gossamer.sync.exact import changing, exact
from gossamer.sync.module_buffers import average


@contextmanager
def at_average(runner: Runner, tensors: Sequence[Tensor]) -> Iterator[None]:
    """Inside, ``tensors`` hold their average over all ranks; afterwards what they were. Collective."""
    own = [tensor.detach().clone() for tensor in tensors]
    try:
        average(runner, [tensor.detach() for tensor in tensors])
        yield
    finally:
        with torch.no_grad():
            torch._foreach_copy_([tensor.detach() for tensor in tensors], own)


@torch.no_grad()
def become_average(
    runner: Runner, optimizers: Iterable[Optimizer], parameters: Iterable[Tensor], buffers: Mapping[str, Tensor]
) -> None:
    """Make parameters, where an optimizer keeps them exactly those, and ``buffers`` the average over all ranks. Collective."""
    with ExitStack() as stack:
        kept: dict[int, Tensor] = {}
        for optimizer in optimizers:
            stack.enter_context(changing(optimizer))
            kept |= {id(parameter): exact(optimizer, parameter) for parameter in held_by(optimizer)}
        average(runner, [kept.get(id(parameter), parameter).detach() for parameter in parameters] + list(buffers.values()))


@torch.no_grad()
def distance(runner: Runner, tensors: Iterable[Tensor]) -> float:
    """The root mean square over ranks of ‖w − w̄‖ / ‖w̄‖, w̄ the mean of ``tensors`` over them. Collective."""
    own = [wide(tensor.detach()) for tensor in tensors]
    means = [tensor.clone() for tensor in own]
    average(runner, means)
    squares = torch.zeros(1, dtype=torch.float64, device=own[0].device)
    for mine, mean in zip(own, means, strict=True):
        squares += torch.linalg.vector_norm(mine - mean, dtype=torch.float64).square()
    average(runner, [squares])
    whole = sum(float(torch.linalg.vector_norm(mean, dtype=torch.float64)) ** 2 for mean in means)
    return math.sqrt(float(squares) / whole) if whole else 0.0
