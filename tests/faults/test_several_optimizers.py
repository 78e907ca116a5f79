"""Several optimizers of one model, some without a parameter that travels, and ranks that leave out their steps."""

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from gossamer import (
    AllReduce,
    ByteGrad,
    DisagreementError,
    Gossip,
    LocalSGD,
    PeerLeftError,
    QuantizedGossip,
    loopback,
    replicate,
)
from gossamer.algorithms import Algorithm
from tests.faults.training import LR, batch, squares, vector

LEVELS = {"a": 1.0, "b": 100.0}
"""By name of the part, what all its weights are: a mean over parts would show."""


def parts() -> nn.ModuleDict:
    model = nn.ModuleDict({name: nn.Linear(4, 4, bias=False) for name in LEVELS}).double()
    for name, level in LEVELS.items():
        nn.init.constant_(model[name].weight, level)
    return model


def train(algorithm: Algorithm, order: str, skips: str, rank: int) -> list[float]:
    """Six iterations in which the optimizers of parts take steps in ``order``; rank 1 leaves out those in ``skips`` once."""
    model = parts()
    optimizers = {name: SGD(model[name].parameters(), lr=0.0) for name in LEVELS}
    replica = replicate(model, list(optimizers.values()), algorithm)
    for iteration in range(6):
        for name in order:
            if rank == 1 and iteration == 2 and name in skips:
                continue
            optimizers[name].zero_grad()
            model[name](batch(rank, iteration)).square().mean().backward()
            optimizers[name].step()
    replica.close(average=True)
    return [level for name in LEVELS for level in model[name].weight.detach().unique().tolist()]


@pytest.mark.parametrize("order", ["ab", "ba", "aab", "baa", "abbb"])
@pytest.mark.parametrize("algorithm", [Gossip(wire="fp32"), LocalSGD(every=2)], ids=["Gossip", "LocalSGD"])
def test_weights_of_two_optimizers_are_not_averaged_with_each_other(algorithm: Algorithm, order: str) -> None:
    """Exchanges meet by their order: a rank that left out an iteration once took part in those of the other optimizer."""
    assert loopback(lambda rank: train(algorithm, order, order, rank), 2) == [[1.0, 100.0]] * 2


@pytest.mark.parametrize("skips", ["a", "b"])
@pytest.mark.parametrize("algorithm", [Gossip(wire="fp32"), LocalSGD(every=2)], ids=["Gossip", "LocalSGD"])
def test_a_step_left_out_of_one_optimizer_alone_is_right_or_refused(algorithm: Algorithm, skips: str) -> None:
    ends, error = [], None
    try:
        ends = loopback(lambda rank: train(algorithm, "ab", skips, rank), 2)
    except DisagreementError as refusal:
        error = str(refusal)
    if error is None:
        assert ends == [[1.0, 100.0]] * 2
    else:
        assert "weights of different optimizers: rank 0 those of optimizer" in error


class Experts(nn.Module):
    """A shared layer, and one that is each rank's own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.shared, self.own = nn.Linear(4, 4).double(), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.own(self.shared(x).tanh())
        return out


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("algorithm", [AllReduce(), ByteGrad(), Gossip(), QuantizedGossip()], ids=lambda a: type(a).__name__)
def test_an_optimizer_may_hold_ignored_parameters_only(algorithm: Algorithm, first: bool) -> None:
    """Nothing of it travels: its steps are this rank's own, also one for which there was no synchronised pass."""

    def run(rank: int) -> tuple[Tensor, Tensor]:
        model = Experts()
        optimizers = [SGD(model.shared.parameters(), lr=LR), SGD(model.own.parameters(), lr=LR)]
        replica = replicate(model, optimizers if first else optimizers[::-1], algorithm, ignore=[model.own])
        for step in range(4):
            for optimizer in optimizers:
                optimizer.zero_grad()
            squares(model, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
            optimizers[1].step()
        replica.close(average=True)
        return vector(model.shared), vector(model.own)

    (shared, own), (shared_too, own_too) = loopback(run, 2)
    assert torch.equal(shared, shared_too)
    assert not torch.equal(own, own_too)


def test_a_pass_that_failed_is_not_followed_by_a_comparison_of_replicas() -> None:
    """A replica that is closed after an error in backward was caught leaves: others wait in that pass, not in a comparison."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: object, *gradients: Tensor) -> Tensor:
            raise MemoryError("out of memory")

    def run(rank: int) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).double()
        replica = replicate(model, SGD(model.parameters(), lr=LR))
        hidden = model[0](batch(rank, 0))
        try:
            model[1](Fails.apply(hidden) if rank == 1 else hidden).square().mean().backward()
        except MemoryError:
            replica.close()

    with pytest.raises(PeerLeftError, match=r"rank 0 waits in .*bucket 0 .*rank 1 ended their training"):
        loopback(run, 2)
