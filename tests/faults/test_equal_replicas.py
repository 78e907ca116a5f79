"""Replicas that are to be equal are looked at, and buffers are brought together where the model is used."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    AllReduce,
    DiLoCo,
    DisagreementError,
    Gossip,
    LocalSGD,
    PowerSGD,
    Replica,
    ScatterReduce,
    UsageError,
    loopback,
)
from gossamer.algorithms.base import Algorithm

GRADIENTS: list[Algorithm] = [AllReduce(), ScatterReduce(), PowerSGD(rank=1)]


def batch(rank: int, step: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank))


def trained(rank: int, algorithm: Algorithm, amid: Callable[[nn.Module], Any] = lambda model: None, **options: Any) -> Any:
    """Two layers and their replica, after four steps; ``amid`` happens before the third."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, algorithm, **options)
    for step in range(4):
        if step == 2 and rank == 1:
            with torch.no_grad():
                amid(model)
        optimizer.zero_grad()
        model(batch(rank, step, 5, 3)).square().mean().backward()
        optimizer.step()
    return model, replica


def changes_a_weight(model: Any) -> None:
    model[1].weight.add_(1.0)


@pytest.mark.parametrize("algorithm", GRADIENTS, ids=repr)
def test_the_distance_is_measured_for_gradient_algorithms(algorithm: Algorithm) -> None:
    def body(rank: int) -> float:
        _, replica = trained(rank, algorithm, changes_a_weight)
        found: float = replica.consensus_distance()
        return found

    assert min(loopback(body, 2)) > 0.1


@pytest.mark.parametrize("world", [2, 3, 7])
@pytest.mark.parametrize("algorithm", GRADIENTS, ids=repr)
def test_the_distance_of_equal_replicas_is_zero(algorithm: Algorithm, world: int) -> None:
    """Exactly: the mean of equal numbers may be rounded, and is no difference."""

    def body(rank: int) -> float:
        _, replica = trained(rank, algorithm)
        found: float = replica.consensus_distance()
        replica.close()
        return found

    assert loopback(body, world) == [0.0] * world


@pytest.mark.parametrize("call", ["state_dict", "close(average)"])
@pytest.mark.parametrize("algorithm", GRADIENTS, ids=repr)
def test_replicas_that_have_parted_are_told_with_the_parameter_and_the_ranks(algorithm: Algorithm, call: str) -> None:
    def body(rank: int) -> None:
        _, replica = trained(rank, algorithm, changes_a_weight)
        with pytest.raises(DisagreementError, match=r"rank(s 0, 2|s 1, 2| 0): 1\.weight.*rank") as caught:
            {"state_dict": replica.state_dict, "close(average)": lambda: replica.close(average=True)}[call]()
        assert "0.weight" not in str(caught.value)

    loopback(body, 3)


@pytest.mark.parametrize("call", [Replica.state_dict, lambda replica: replica.close(average=True)], ids=["state_dict", "close"])
@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(), LocalSGD(every=2), DiLoCo(every=2)], ids=repr)
def test_a_frozen_parameter_that_has_changed_on_one_rank_is_told(algorithm: Algorithm, call: Any) -> None:
    """It never travels, so that no exchange would make it equal again."""

    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[1].bias.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(4):
            if step == 2 and rank == 1:
                model[1].bias.data.add_(1)
            optimizer.zero_grad()
            model(batch(rank, step, 5, 3)).square().mean().backward()
            optimizer.step()
        call(replica)

    with pytest.raises(DisagreementError, match=r"rank 0: 1\.bias: .*rank 1: 1\.bias: "):
        loopback(body, 2)


def test_an_embedding_that_renormalises_what_it_reads_is_told() -> None:
    """``max_norm`` changes the rows that this rank has looked up, and no others."""

    def body(rank: int) -> None:
        torch.manual_seed(0)
        model = nn.Embedding(10, 4, max_norm=0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.tensor([rank, rank + 3])).sum().backward()
            optimizer.step()
        with pytest.raises(DisagreementError, match="weight"):
            replica.close(average=True)

    loopback(body, 2)


@pytest.mark.parametrize("buffers", [None, "local"])
def test_what_may_differ_is_not_told(buffers: Any) -> None:
    """Weights between averages, with what was frozen, and buffers between forward passes."""

    def body(rank: int, algorithm: Algorithm) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, buffers=buffers)
        for step in range(3):
            optimizer.zero_grad()
            model(batch(rank, step, 5, 3)).square().mean().backward()
            optimizer.step()
        replica.state_dict()
        replica.close()

    for algorithm in (Gossip(), LocalSGD(dense=0), AllReduce()):
        loopback(lambda rank, algorithm=algorithm: body(rank, algorithm), 3)  # type: ignore[misc]


def test_a_rank_that_closes_because_of_an_error_waits_for_nobody() -> None:
    class Own(Exception):
        pass

    def body(rank: int) -> None:
        _, replica = trained(rank, AllReduce())
        try:
            if rank == 1:
                raise Own
        finally:
            if rank == 1:
                replica.close()

    with pytest.raises(Own):
        loopback(body, 2)


def test_optimizers_that_communicate_by_themselves_keep_replicas_equal() -> None:
    def body(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = gossamer.optim.OneBitAdam(model.parameters(), lr=0.01, warmup=2)
        replica = gossamer.replicate(model, optimizer)
        for step in range(5):
            optimizer.zero_grad()
            model(batch(rank, step, 5, 3)).square().mean().backward()
            optimizer.step()
        found = replica.consensus_distance()
        replica.close()
        return found

    assert loopback(body, 3) == [0.0] * 3


# -- buffers --------------------------------------------------------------------------------------------------------


def normalised(rank: int, buffers: Any, root: bool = True) -> Any:
    """A model with running statistics that have seen different data, and its replica."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    if not root:
        model.eval()
        model[1].train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, AllReduce(), buffers=buffers)
    for step in range(4):
        optimizer.zero_grad()
        model(batch(rank, step, 6, 3) * (1 + 3 * rank)).square().mean().backward()
        optimizer.step()
    return model, replica


@pytest.mark.parametrize("how", ["consensus", "close"])
@pytest.mark.parametrize("buffers", ["broadcast", "average"])
def test_one_batch_evaluates_to_one_value_on_all_ranks(buffers: str, how: str) -> None:
    def body(rank: int) -> tuple[float, float]:
        model, replica = normalised(rank, buffers)
        model(batch(rank, 8, 6, 3))  # in training mode, and no backward pass follows
        own = model[1].running_mean[0].item()

        def evaluated() -> float:
            with torch.no_grad():
                found: float = model.eval()(batch(9, 9, 50, 3)).mean().item()
            return found

        if how == "consensus":
            with replica.consensus():
                return evaluated(), own
        replica.close(average=True)
        return evaluated(), own

    found = loopback(body, 2)
    assert found[0][1] != found[1][1]
    assert found[0][0] == found[1][0]


def test_buffers_of_which_each_rank_keeps_its_own_stay_so() -> None:
    def body(rank: int) -> tuple[float, float]:
        model, replica = normalised(rank, "local")
        with replica.consensus():
            inside = model[1].running_mean[0].item()
        replica.close(average=True)
        return inside, model[1].running_mean[0].item()

    first, second = loopback(body, 2)
    assert first[0] != second[0]
    assert first[1] != second[1]


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
def test_buffers_of_a_module_in_training_are_kept_together_though_the_model_is_not(buffers: str) -> None:
    """``model.eval()``, and then some of its modules back to training."""

    def body(rank: int) -> Tensor:
        model, _ = normalised(rank, buffers, root=False)
        model(torch.zeros(6, 3))
        found: Tensor = model[1].running_mean.clone()
        return found

    found = loopback(body, 2)
    assert torch.equal(found[0], found[1])


class Grows(nn.Module):
    """Its buffer gets another shape."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("table", torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x) * self.table.mean()
        return y

    def grow(self, how: str) -> None:
        if how == "assigned":
            self.table = torch.ones(4)
        else:
            self.table.resize_(4).fill_(1.0)


@pytest.mark.parametrize("how", ["assigned", "resized"])
@pytest.mark.parametrize("ranks", [(1,), (0, 1)])
@pytest.mark.parametrize(
    ("algorithm", "buffers"),
    [(AllReduce(), None), (AllReduce(), "average"), (Gossip(), None), (LocalSGD(every=1), None)],
    ids=repr,
)
def test_a_buffer_that_gets_another_shape_is_told_by_name(
    how: str, ranks: tuple[int, ...], algorithm: Algorithm, buffers: Any
) -> None:
    def body(rank: int) -> None:
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, algorithm, buffers=buffers)
        for step in range(4):
            if step == 2 and rank in ranks:
                model.grow(how)
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()

    with pytest.raises(UsageError, match=r"rank [01].*'table'.*\[1\].*\[4\]"):
        loopback(body, 2)


@pytest.mark.parametrize("call", ["consensus", "close"])
@pytest.mark.parametrize("how", ["another type", "one more"])
@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(), LocalSGD(every=2)], ids=repr)
def test_buffers_that_differ_between_ranks_are_told_by_name(algorithm: Algorithm, how: str, call: str) -> None:
    """By calls for which all ranks bring them together."""

    def body(rank: int) -> None:
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        if rank == 1 and how == "another type":
            model.table = model.table.double()
        elif rank == 1:
            model.register_buffer("later", torch.ones(2))
        if call == "close":
            replica.close(average=True)
        else:
            with replica.consensus():
                pass

    with pytest.raises(DisagreementError, match=r"rank 1: (table|later): torch\.float(64|32) \["):
        loopback(body, 2)


def test_a_buffer_of_which_each_rank_keeps_its_own_may_get_another_shape() -> None:
    def body(rank: int) -> None:
        model = Grows()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, buffers="local")
        for step in range(4):
            if step == 2 and rank == 1:
                model.grow("assigned")
            optimizer.zero_grad()
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
        replica.close()

    loopback(body, 2)
