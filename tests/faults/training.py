"""What the tests of faults share: small trainings in loopback, their right values, and what counts as a refusal."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from gossamer import GossamerError, loopback

LR = 0.05

Loss = Callable[[nn.Module, int, int], Tensor]
Train = Callable[[int], Tensor]


def mlp() -> nn.Module:
    """A small model in double precision, the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=LR, momentum=0.5)


def batch(rank: int, step: int, *shape: int) -> Tensor:
    """Random numbers of one rank and step, ``(5, 4)`` by default."""
    source = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(shape or (5, 4), generator=source, dtype=torch.float64)


def squares(model: nn.Module, rank: int, step: int) -> Tensor:
    """The loss of a rank's batch."""
    return model(batch(rank, step)).square().mean()


def vector(model: nn.Module) -> Tensor:
    """All parameters as one vector."""
    return torch.cat([parameter.detach().reshape(-1).double() for parameter in model.parameters()])


class Ramp(nn.Module):
    """A loss whose gradient is what it is called with: sums of gradients are known in advance."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(shape or (8,), dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.w * gradient).sum()


def mean_gradients(model: nn.Module, losses: Iterable[Tensor]) -> None:
    """Set each ``grad`` to the mean over ranks, zero where a rank has none, and None where no rank has one."""
    parameters = list(model.parameters())
    rows = [torch.autograd.grad(loss, parameters, allow_unused=True) for loss in losses]
    for parameter, column in zip(parameters, zip(*rows, strict=True), strict=True):
        there = [gradient for gradient in column if gradient is not None]
        parameter.grad = torch.stack(there).sum(0) / len(rows) if there else None


def single_process(
    world: int,
    steps: int,
    build: Callable[[], nn.Module] = mlp,
    loss: Loss = squares,
    optimizer: Callable[[nn.Module], Optimizer] = sgd,
) -> Tensor:
    """The weights of one model trained with the mean gradient of all ranks."""
    model = build()
    update = optimizer(model)
    for step in range(steps):
        mean_gradients(model, [loss(model, rank, step) for rank in range(world)])
        update.step()
    return vector(model)


def right_or_refused(train: Train, right: Tensor, names: Iterable[str], tolerance: float = 1e-9) -> None:
    """Every rank ends ``train`` with the right values, or the run ends with an error of ours that names a rank and one of
    these parameters. There is no third outcome."""
    ranks, error = outcome(train)
    if error is not None:
        named = "|".join(re.escape(name) for name in names)
        assert re.search(r"rank \d", str(error)), f"names no rank: {error}"
        assert re.search(rf"'({named})'", str(error)), f"names no parameter: {error}"
    for rank, values in enumerate(ranks):
        assert torch.allclose(values, right, rtol=0, atol=tolerance), f"rank {rank} is wrong by {(values - right).abs().max()}"


def outcome(train: Train, world: int = 2) -> tuple[list[Tensor], GossamerError | None]:
    """What the ranks end with, or the error of ours that ends the run."""
    try:
        return loopback(train, world), None
    except GossamerError as error:
        return [], error


def names_of(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters()]


def with_known_faults(values: Sequence[Any], faults: Mapping[str, str], name: Callable[[Any], str] = str) -> list[Any]:
    """Parameters of a test, of which those named in ``faults`` fail today, for the reason that stands there."""
    unknown = faults.keys() - {name(value) for value in values}
    assert not unknown, f"no such parameters: {unknown}"
    return [
        pytest.param(value, id=name(value), marks=[pytest.mark.xfail(strict=True, reason=faults[name(value)])])
        if name(value) in faults
        else pytest.param(value, id=name(value))
        for value in values
    ]
