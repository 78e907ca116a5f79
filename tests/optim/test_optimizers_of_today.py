"""Optimizers that people use today, under gradient and weight algorithms: the result by hand, or a refusal with the reason.

Gradients are whole numbers, so that their means are exact, and whatever an optimizer makes of them is the same to the bit.
"""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import gossamer
from gossamer import AllReduce, DiLoCo, Gossip, UsageError, loopback

STEPS = 6

Make = Callable[["Shapes"], Sequence[Optimizer]]


class Shapes(nn.Module):
    """Matrices and a vector; its gradient is what it is called with."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        for name, shape in {"wide": (8, 16), "tall": (12, 4), "bias": (7,)}.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=source).to(dtype)))

    def forward(self, gradients: Sequence[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parameters(), gradients, strict=True)]).sum()

    def matrices(self) -> list[nn.Parameter]:
        return [p for p in self.parameters() if p.dim() == 2]


class Lion(Optimizer):
    """The update is the sign of an interpolated momentum (Chen and others, 2023), as in common implementations."""

    def __init__(self, parameters: Any, lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.99)) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.sub_(torch.sign(average * group["betas"][0] + p.grad * (1 - group["betas"][0])), alpha=group["lr"])
                average.lerp_(p.grad, 1 - group["betas"][1])


def fused(model: Shapes) -> Sequence[Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)]


def muon_beside_adamw(model: Shapes) -> Sequence[Optimizer]:
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon is newer than this torch")
    return [torch.optim.Muon(model.matrices(), lr=1e-2), torch.optim.AdamW([model.bias], lr=1e-2)]


def lion(model: Shapes) -> Sequence[Optimizer]:
    return [Lion(model.parameters())]


def schedule_free(model: Shapes) -> Sequence[Optimizer]:
    found = pytest.importorskip("schedulefree", reason="schedulefree is not installed (pip install '.[integrations]')")
    optimizer = found.AdamWScheduleFree(model.parameters(), lr=1e-2, foreach=False)
    optimizer.train()
    return [optimizer]


def shampoo(model: Shapes) -> Sequence[Optimizer]:
    found = pytest.importorskip(
        "pytorch_optimizer", reason="pytorch_optimizer is not installed (pip install '.[integrations]')"
    )
    return [found.Shampoo(model.parameters(), lr=1e-2, preconditioning_compute_steps=1)]


def eight_bit(model: Shapes) -> Sequence[Optimizer]:
    found = pytest.importorskip("torchao.optim", reason="torchao is not installed (pip install '.[integrations]')")
    return [found.AdamW8bit(model.parameters(), lr=1e-2, block_size=16)]


ALL = [fused, muon_beside_adamw, lion, schedule_free, shampoo, pytest.param(eight_bit, marks=pytest.mark.slow)]


def gradients(rank: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    source = torch.Generator().manual_seed(100 * step + rank)
    return [torch.randint(-8, 9, p.shape, generator=source).to(dtype) for p in Shapes(dtype).parameters()]


def vector(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def trained(rank: int, make: Make, algorithm: gossamer.Algorithm, dtype: torch.dtype) -> Tensor:
    model = Shapes(dtype)
    optimizers = make(model)
    replica = gossamer.replicate(model, list(optimizers), algorithm)
    for step in range(STEPS):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(gradients(rank, step, dtype)).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = vector(model)
    replica.close()
    return found


def alone(make: Make, of_step: Callable[[int], Sequence[Tensor]], dtype: torch.dtype) -> Tensor:
    """One process that is given the mean gradients."""
    model = Shapes(dtype)
    optimizers = make(model)
    for step in range(STEPS):
        for parameter, gradient in zip(model.parameters(), of_step(step), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
    return vector(model)


def mean_of(ranks: int, step: int, dtype: torch.dtype) -> list[Tensor]:
    return [torch.stack(each).mean(0) for each in zip(*(gradients(r, step, dtype) for r in range(ranks)), strict=True)]


@pytest.mark.parametrize("make", ALL)
def test_mean_gradients_make_what_one_process_would(make: Make) -> None:
    right = alone(make, lambda step: mean_of(2, step, torch.float32), torch.float32)
    assert not torch.equal(right, vector(Shapes(torch.float32)))
    for found in loopback(lambda rank: trained(rank, make, AllReduce(), torch.float32), 2):
        assert torch.equal(found, right)


def gossiped(make: Make, dtype: torch.dtype) -> list[Tensor]:
    """By hand: each of two workers steps, sends its weights, and adds half the difference just before its next update."""
    models = [Shapes(dtype) for _ in range(2)]
    optimizers = [make(model) for model in models]
    sent: list[list[Tensor]] | None = None
    for step in range(STEPS):
        for rank, model in enumerate(models):
            for parameter, gradient in zip(model.parameters(), gradients(rank, step, dtype), strict=True):
                parameter.grad = gradient
        if sent is not None:
            for rank, model in enumerate(models):
                for number, parameter in enumerate(model.parameters()):
                    parameter.data += 0.5 * (sent[1 - rank][number] - sent[rank][number])
        for several in optimizers:
            for optimizer in several:
                optimizer.step()
        sent = [[p.detach().clone() for p in model.parameters()] for model in models]
    return [vector(model) for model in models]


@pytest.mark.parametrize("make", [fused, muon_beside_adamw, lion, shampoo])
def test_gossip_averages_what_they_make(make: Make) -> None:
    right = gossiped(make, torch.float64)
    found = loopback(lambda rank: trained(rank, make, Gossip(wire="fp32"), torch.float64), 2)
    assert not torch.equal(*right)
    for mine, reference in zip(found, right, strict=True):
        assert torch.allclose(mine, reference, rtol=0, atol=1e-12)


@pytest.mark.parametrize("algorithm", [Gossip(), DiLoCo(every=2)], ids=repr)
def test_a_second_sequence_of_weights_is_refused_where_weights_travel(algorithm: gossamer.Algorithm) -> None:
    def body(rank: int) -> None:
        with pytest.raises(UsageError, match=r"second sequence of weights \('z'"):
            trained(rank, schedule_free, algorithm, torch.float32)

    loopback(body, 2)


@pytest.mark.slow
def test_gossip_takes_eight_bit_states() -> None:
    found = loopback(lambda rank: trained(rank, eight_bit, Gossip(wire="fp32"), torch.float32), 2)
    for mine, right in zip(found, gossiped(eight_bit, torch.float32), strict=True):
        assert torch.allclose(mine, right, rtol=0, atol=1e-6)
