"""GossipGraD: what the optimizer remembers is averaged with the weights."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

import gossamer
from gossamer import GossipGraD, Hierarchical, after, loopback
from gossamer.comm.topology import Complete
from gossamer.errors import ConfigurationError, DisagreementError
from gossamer.optim import MasterWeights

Make = Callable[[Any], Optimizer]

OPTIMIZERS: dict[str, tuple[Make, tuple[str, ...]]] = {
    "momentum": (lambda p: SGD(p, lr=0.1, momentum=0.9), ("momentum_buffer",)),
    "Adam": (lambda p: Adam(p, lr=1e-2), ("exp_avg", "exp_avg_sq")),
    "amsgrad": (lambda p: AdamW(p, lr=1e-2, amsgrad=True), ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")),
}


def pull(model: nn.Linear, optimizer: Optimizer, target: float) -> None:
    optimizer.zero_grad()
    (model.weight - target).square().sum().mul(0.5).backward()
    optimizer.step()


def train(
    algorithm: gossamer.Algorithm, make: Make, rank: int, steps: int = 12
) -> tuple[nn.Linear, Optimizer, gossamer.Replica]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False)
    optimizer = make(model.parameters())
    replica = gossamer.replicate(model, optimizer, algorithm)
    for _ in range(steps):
        pull(model, optimizer, float(rank))
    return model, optimizer, replica


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("late", [False, True])
def test_history_is_averaged_with_the_weights(name: str, late: bool) -> None:
    make, keys = OPTIMIZERS[name]

    def body(rank: int) -> list[Tensor]:
        model, optimizer, replica = train(GossipGraD(wire="fp32", topology=Complete(), late=late), make, rank)
        replica.close()  # adds what is under way: all workers now have the average of everything
        return [model.weight.detach(), *(optimizer.state[model.weight][key] for key in keys)]

    found = loopback(body, 4)
    for tensors in zip(*found, strict=True):
        assert all(torch.allclose(tensor, tensors[0], atol=1e-6) for tensor in tensors)


def test_late_application_changes_nothing_but_when_it_is_waited_for() -> None:
    def body(late: bool) -> list[Tensor]:
        def run(rank: int) -> Tensor:
            model, _, replica = train(GossipGraD(wire="fp32", history=False, late=late), OPTIMIZERS["momentum"][0], rank)
            replica.close()
            return model.weight.detach()

        return loopback(run, 5)

    for early, late in zip(body(False), body(True), strict=True):
        assert torch.allclose(early, late, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_without_history_optimizers_stay_apart(name: str) -> None:
    make, keys = OPTIMIZERS[name]

    def body(rank: int) -> list[Tensor]:
        model, optimizer, replica = train(GossipGraD(wire="fp32", topology=Complete(), history=False), make, rank)
        replica.close()
        return [optimizer.state[model.weight][key] for key in keys]

    found = loopback(body, 4)
    assert not torch.allclose(found[0][0], found[3][0], atol=1e-3)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("world", [3, 4])
def test_the_mean_moves_its_full_length(wire: str, late: bool, world: int) -> None:
    """A constant gradient, different on each worker, with momentum: the mean goes where the mean gradient leads it."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(20, 1, bias=False).double()
        begin = model.weight.detach().clone()
        optimizer = SGD(model.parameters(), lr=1e-6, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, GossipGraD(wire=wire, late=late))  # type: ignore[arg-type]
        for _ in range(200):
            optimizer.zero_grad()
            (model.weight.sum() * (1 + rank)).backward()
            optimizer.step()
        with replica.consensus():
            return model.weight.detach() - begin

    alone = torch.zeros(1, dtype=torch.float64)
    velocity = 0.0
    for _ in range(200):
        velocity = 0.9 * velocity + (world + 1) / 2
        alone -= 1e-6 * velocity
    for moved in loopback(body, world):
        assert (moved / alone - 1).abs().max() < 0.01


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_second_moments_never_become_negative(wire: str) -> None:
    def body(rank: int) -> float:
        def make(parameters: Any) -> Optimizer:
            return Adam(parameters, lr=1e-2, betas=(0.9, 0.5))

        model, optimizer, replica = train(GossipGraD(wire=wire, topology=Complete()), make, 10 * rank, steps=20)  # type: ignore[arg-type]
        replica.close()
        return float(optimizer.state[model.weight]["exp_avg_sq"].min())

    assert all(smallest >= 0 for smallest in loopback(body, 5))


@pytest.mark.parametrize(
    ("make", "key"),
    [
        (lambda p: torch.optim.Adadelta(p, rho=0.3), "square_avg"),
        (lambda p: torch.optim.Adadelta(p, rho=0.3), "acc_delta"),
        (lambda p: torch.optim.RMSprop(p, alpha=0.3), "square_avg"),
        (lambda p: torch.optim.Adamax(p, betas=(0.9, 0.3)), "exp_inf"),
        (lambda p: Adam(p, betas=(0.9, 0.3)), "exp_avg_sq"),
    ],
    ids=["Adadelta", "Adadelta's updates", "RMSprop", "Adamax", "Adam"],
)
def test_what_arrives_late_does_not_make_squares_negative(make: Make, key: str) -> None:
    """They shrink by 0.3 a step, while half of what they were when they were sent is subtracted."""

    def body(rank: int) -> float:
        torch.manual_seed(0)
        model, smallest = nn.Linear(3, 2, bias=False), 1.0
        optimizer = make(model.parameters())
        replica = gossamer.replicate(model, optimizer, GossipGraD(late=True))
        for step in range(8):
            optimizer.zero_grad()
            (model.weight.sum() * (1.0 if step == 2 * rank else 0.0)).backward()
            optimizer.step()
            smallest = min(smallest, float(optimizer.state[model.weight][key].min()))
        replica.close()
        assert model.weight.isfinite().all()
        return smallest

    assert all(smallest >= 0 for smallest in loopback(body, 3))


def test_master_weights_and_their_history() -> None:
    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2, bias=False).bfloat16()
        optimizer = MasterWeights(Adam, model.parameters(), lr=1e-2)
        replica = gossamer.replicate(model, optimizer, GossipGraD(wire="fp32", topology=Complete()))
        for _ in range(5):
            pull(model, optimizer, float(rank))
        replica.close()
        return [optimizer.exact_weight(model.weight).detach(), optimizer.exact_state(model.weight)["exp_avg"]]

    found = loopback(body, 3)
    assert all(
        torch.allclose(mine, first, atol=1e-6) for tensors in found for mine, first in zip(tensors, found[0], strict=True)
    )


@pytest.mark.parametrize("algorithm", [Hierarchical(GossipGraD(), ranks_per_node=2), after(3, GossipGraD())], ids=repr)
def test_inside_other_algorithms(algorithm: gossamer.Algorithm) -> None:
    def body(rank: int) -> float:
        _, _, replica = train(algorithm, OPTIMIZERS["Adam"][0], rank % 2, steps=20)
        return replica.consensus_distance()

    assert all(distance < 0.05 for distance in loopback(body, 4))


def test_optimizers_that_remember_different_things() -> None:
    def body(rank: int) -> None:
        train(GossipGraD(), lambda p: SGD(p, lr=0.1, momentum=0.9 if rank else 0.0), rank, steps=2)

    with pytest.raises(
        DisagreementError, match="what the optimizer remembers: rank 0: nothing; rank 1: momentum_buffer of weight"
    ):
        loopback(body, 2)


def test_bad_input() -> None:
    with pytest.raises(ConfigurationError, match="late must be True or False; got 1"):
        GossipGraD(late=1)  # type: ignore[arg-type]


def test_a_parameter_unused_on_some_rank_keeps_its_history_there(caplog: pytest.LogCaptureFixture) -> None:
    """All others' histories travel; those of the branch that one rank has not taken yet stay each rank's own, which is told."""

    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.common, self.rare = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
            return (self.rare(self.common(x)) if rare else self.common(x)).square().mean()

    def body(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        torch.manual_seed(0)
        model = Branches()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, GossipGraD(wire="fp32"))
        for step in range(6):
            optimizer.zero_grad()
            model(torch.randn(4, 3), rare=rank == 0 or step > 3).backward()
            optimizer.step()
        replica.close(average=True)
        return [p.detach() for p in model.parameters()], optimizer.state[model.common.weight]["momentum_buffer"]

    (first, _), (second, _) = gossamer.loopback(body, 2)
    assert all(map(torch.equal, first, second))
    (told,) = [record.getMessage() for record in caplog.records]
    assert "'rare.weight' (rank 1), 'rare.bias' (rank 1)" in told
    assert "join" not in told
