"""What users of DDP have: parameters that are left alone, sparse and complex ones, options of join, attributes of the model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import gossamer
from gossamer import AllReduce, ConfigurationError, DiLoCo, Gossip, LocalSGD, PowerSGD, ScatterReduce, UsageError, loopback
from gossamer.algorithms.base import Algorithm

ANY: list[Algorithm] = [AllReduce(), ScatterReduce(), Gossip(wire="fp32"), LocalSGD(every=1)]


# -- ignored --------------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """A layer that every rank has of its own, of another shape on each, and one that all share."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(rank)
        self.expert = nn.Sequential(nn.Linear(3, 4 + rank), nn.BatchNorm1d(4 + rank))
        torch.manual_seed(0)
        self.shared = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.expert(x).square().mean() + self.shared(x).square().mean()
        return loss


def ignored(how: str, model: Experts) -> dict[str, Any]:
    names = ["expert.0.weight", "expert.0.bias", "expert.1.weight", "expert.1.bias"]
    names += ["expert.1.running_mean", "expert.1.running_var", "expert.1.num_batches_tracked"]
    if how == "as DDP is told":
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)
        return {}
    return {"ignore": {"names": names, "a module's name": ["expert"], "a module": [model.expert]}[how]}


@pytest.mark.parametrize("how", ["as DDP is told", "names", "a module's name", "a module"])
@pytest.mark.parametrize("algorithm", ANY, ids=repr)
def test_what_is_ignored_trains_on_each_rank_alone(algorithm: Algorithm, how: str) -> None:
    """As it does without gossamer, and the rest as it does where there is nothing else."""

    def body(rank: int) -> None:
        def train(model: Any, optimizer: Any) -> None:
            for step in range(4):
                optimizer.zero_grad()
                x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * step + rank))
                model(x).backward()
                optimizer.step()

        model = Experts(rank)
        expert = copy.deepcopy(model.expert)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, algorithm, **ignored(how, model))
        train(model, optimizer)
        replica.consensus_distance()
        with replica.consensus():
            pass
        state = replica.state_dict()
        replica.load_state_dict(state)
        replica.close(average=True)
        train_alone = torch.optim.AdamW(expert.parameters(), lr=0.01)
        train(lambda x: expert(x).square().mean(), train_alone)
        assert all(map(torch.equal, expert.state_dict().values(), model.expert.state_dict().values()))

        shared = nn.Linear(3, 2)
        shared.load_state_dict(Experts(0).shared.state_dict())
        optimizer = torch.optim.AdamW(shared.parameters(), lr=0.01)
        replica = gossamer.replicate(shared, optimizer, algorithm)
        train(lambda x: shared(x).square().mean(), optimizer)
        replica.close(average=True)
        assert torch.allclose(shared.weight, model.shared.weight, atol=1e-6)

    loopback(body, 3)


def test_what_is_to_be_ignored_must_be_there() -> None:
    for unknown in ("expert.weights", nn.Linear(1, 1)):
        model = Experts(0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ConfigurationError, match=r"ignore.*(expert\.weights|Linear)"):
            gossamer.replicate(model, optimizer, ignore=[unknown])


def test_ranks_that_ignore_other_parameters_are_told() -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        ignore = ["0.weight"] if rank == 1 else []
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), ignore=ignore)

    with pytest.raises(gossamer.DisagreementError, match=r"0\.weight"):
        loopback(body, 2)


def test_a_parameter_that_is_ignored_may_be_of_any_kind() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 2, sparse=True), "head": nn.Linear(2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, ignore=[model["table"]])
    model["head"](model["table"](torch.tensor([1]))).sum().backward()
    optimizer.step()
    replica.close()


# -- sparse and complex ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize("algorithm", [AllReduce(), ScatterReduce()], ids=repr)
def test_sparse_gradients_are_refused_before_they_come(kind: Any, algorithm: Algorithm) -> None:
    model = nn.Sequential(nn.Identity(), kind(10, 4, sparse=True))
    with pytest.raises(ConfigurationError, match=r"'1\.weight'.*sparse=True"):
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm)


def test_sparse_gradients_stay_where_weights_travel() -> None:
    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Embedding(6, 2, sparse=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, LocalSGD(every=1))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.tensor([rank, 3])).sum().backward()
            optimizer.step()
        replica.close(average=True)
        return model.weight.detach().clone()

    found = loopback(body, 2)
    assert torch.equal(found[0], found[1])


class Complex(nn.Module):
    """One complex matrix, behind an odd number of real numbers."""

    def __init__(self) -> None:
        super().__init__()
        source = torch.Generator().manual_seed(0)
        self.real = nn.Parameter(torch.randn(3, generator=source))
        self.matrix = nn.Parameter(torch.randn(3, 3, generator=source, dtype=torch.complex64))
        self.last = nn.Parameter(torch.randn(1, generator=source))

    def forward(self, x: Tensor) -> Tensor:
        y = self.matrix @ (x * self.real).to(torch.complex64)
        loss: Tensor = (y.abs().square().sum() + y.imag.sum()) * self.last.square().sum()
        return loss


def input_of(rank: int, step: int) -> Tensor:
    return torch.randn(3, generator=torch.Generator().manual_seed(10 * step + rank))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("optimizer_of", [torch.optim.SGD, torch.optim.Adam])
def test_complex_parameters_train_as_with_the_whole_batch(optimizer_of: Any, passes: int) -> None:
    def body(rank: int) -> list[Tensor]:
        model = Complex()
        optimizer = optimizer_of(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, AllReduce())
        for step in range(4):
            optimizer.zero_grad()
            for number in range(passes):
                model(input_of(rank, passes * step + number)).backward()
            optimizer.step()
        assert replica.consensus_distance() == 0.0
        replica.load_state_dict(replica.state_dict())
        replica.close()
        return [p.detach() for p in model.parameters()]

    alone = Complex()
    optimizer = optimizer_of(alone.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        for number in range(passes):
            torch.stack([alone(input_of(rank, passes * step + number)) for rank in range(3)]).mean().backward()
        optimizer.step()
    for found in loopback(body, 3):
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, alone.parameters(), strict=True))


@pytest.mark.parametrize(
    "algorithm",
    [
        Gossip(wire="fp32"),
        Gossip(),
        LocalSGD(every=1),
        DiLoCo(every=1),
        gossamer.in_parts(2, Gossip()),
        ScatterReduce(),
        PowerSGD(rank=1),
    ],
    ids=repr,
)
def test_complex_parameters_under_every_kind_of_algorithm(algorithm: Algorithm) -> None:
    """Replicas come together, real and imaginary parts alike, and stay so where ``.data`` is another tensor."""

    def body(rank: int) -> Tensor:
        model = Complex()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        if algorithm.subject == "weights":
            with torch.no_grad():
                model.matrix.add_(complex(rank, -rank))
        for step in range(14):
            optimizer.zero_grad()
            model(input_of(rank, step)).backward()
            optimizer.step()
            if step == 4:
                model.matrix.data = model.matrix.data.clone()
        assert replica.consensus_distance() < 0.05
        replica.close(average=True)
        return model.matrix.detach()

    found = loopback(body, 2)
    assert torch.allclose(found[0], found[1], atol=1e-6)
    if algorithm.subject == "weights" and not algorithm.traits.moves_mean:
        assert torch.allclose(found[0], Complex().matrix + complex(0.5, -0.5), atol=0.02)


# -- join -----------------------------------------------------------------------------------------------------------


def joined(rank: int, batches: int, **options: Any) -> list[float]:
    """The gradients of a rank with so many batches, whose own are ``rank + 1``."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    replica = gossamer.replicate(model, optimizer)
    found = []
    with replica.join(**options):
        for _ in range(batches):
            optimizer.zero_grad()
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            optimizer.step()
            assert model.weight.grad is not None
            found.append(model.weight.grad.item())
    replica.close()
    return found


def test_the_mean_may_be_that_of_the_ranks_that_still_train() -> None:
    """Of three ranks with 1, 2 and 3 batches."""
    found = loopback(lambda rank: joined(rank, rank + 1, divide_by_initial_world_size=False), 3)
    assert found[2] == pytest.approx([2.0, 2.5, 3.0])
    found = loopback(lambda rank: joined(rank, rank + 1, divide_by_initial_world_size=True), 3)
    assert found[2] == pytest.approx([2.0, 5 / 3, 1.0])


def test_all_may_stop_where_the_first_one_ends() -> None:
    def body(rank: int) -> None:
        with pytest.raises(UsageError, match=r"rank 0 has no more batches"):
            joined(rank, rank + 1, throw_on_early_termination=True)

    loopback(body, 3)
    assert loopback(lambda rank: joined(rank, 2, throw_on_early_termination=True), 2) == [[1.5, 1.5]] * 2


# -- attributes of the model ----------------------------------------------------------------------------------------


def test_the_attribute_by_which_scripts_accumulate_is_honoured() -> None:
    """``model.require_backward_grad_sync = micro_step == last``, as scripts for DDP have it."""

    def body(rank: int) -> None:
        model = nn.Linear(1, 1, bias=False)
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for micro_step in range(3):
            model.require_backward_grad_sync = micro_step == 2
            model(torch.full((1, 1), rank + 1.0)).sum().backward()
            assert replica.step == (micro_step == 2)
        assert model.weight.grad is not None
        assert model.weight.grad.item() == 3 * 1.5
        replica.close()

    loopback(body, 2)


def test_the_model_gets_no_method_that_it_has_not() -> None:
    """It stays what it was, in all copies; accumulation is the replica's business."""
    model = nn.Linear(1, 1)
    replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert not hasattr(model, "no_sync")
    replica.close()


# -- without the delay of one step ----------------------------------------------------------------------------------


def quadratic(rank: int, algorithm: Algorithm, steps: int) -> list[Tensor]:
    """The weight after each step of SGD towards another target on each rank."""
    model = nn.Linear(1, 4, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    replica = gossamer.replicate(model, optimizer, algorithm)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        (0.5 * (model.weight - rank - torch.arange(4.0, dtype=torch.float64)[:, None]).square().sum()).backward()
        optimizer.step()
        found.append(model.weight.detach().clone())
    replica.close()
    return found


def local_steps(weight: Tensor, rank: int, steps: int) -> list[Tensor]:
    found = []
    for _ in range(steps):
        weight = weight - 0.1 * (weight - rank - torch.arange(4.0, dtype=torch.float64)[:, None])
        found.append(weight)
    return found


def test_local_sgd_without_delay_is_that_of_the_paper() -> None:
    """Stich 2018, algorithm 1: every H-th step all go on from the mean of their updated weights."""
    every, rounds, world = 3, 4, 3
    algorithm = LocalSGD(every=every, delay=0)
    found = loopback(lambda rank: quadratic(rank, algorithm, every * rounds), world)
    start = torch.zeros(4, 1, dtype=torch.float64)
    for number in range(rounds):
        walks = [local_steps(start, rank, every) for rank in range(world)]
        start = torch.stack([walk[-1] for walk in walks]).mean(dim=0)
        for rank in range(world):
            walks[rank][-1] = start
            mine = found[rank][number * every : (number + 1) * every]
            assert all(torch.allclose(a, b, rtol=1e-12, atol=1e-14) for a, b in zip(mine, walks[rank], strict=True))


@pytest.mark.parametrize("nesterov", [True, False])
def test_diloco_without_delay_is_that_of_the_paper(nesterov: bool) -> None:
    """Douillard et al. 2023, algorithm 1, with torch's SGD as the outer optimizer, from the weights that all began at."""
    every, rounds, world = 3, 4, 3
    algorithm = DiLoCo(every=every, rate=0.7, momentum=0.9, nesterov=nesterov, delay=0)
    found = loopback(lambda rank: quadratic(rank, algorithm, every * rounds), world)
    outer = nn.Parameter(torch.zeros(4, 1, dtype=torch.float64))
    optimizer = torch.optim.SGD([outer], lr=0.7, momentum=0.9, nesterov=nesterov)
    for number in range(rounds):
        ends = [local_steps(outer.detach(), rank, every)[-1] for rank in range(world)]
        outer.grad = outer.detach() - torch.stack(ends).mean(dim=0)
        optimizer.step()
        for rank in range(world):
            assert torch.allclose(found[rank][(number + 1) * every - 1], outer.detach(), rtol=1e-12, atol=1e-14)


def test_the_first_exchange_of_diloco_is_an_outer_step_from_where_all_began() -> None:
    """With the delay of one step, too: not a mean."""

    def body(rank: int) -> float:
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=1, rate=0.5, momentum=0.0))
        (model.weight * (rank + 1)).sum().backward()
        optimizer.step()
        replica.wait_for_exchanges()
        replica.close()
        return model.weight.item()

    # From 1, by 1 and 2: the mean delta is 1.5, half of which is taken.
    assert loopback(body, 2) == [0.25, 0.25]


def tied_model(tied: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3))
    if tied == "by object":
        model[1].weight = model[0].weight
    else:
        model[1].weight.data = model[0].weight.data if tied == "by memory" else model[0].weight.data[:3]
    return model


@pytest.mark.parametrize("left", ["0", "1"])
@pytest.mark.parametrize("tied", ["by object", "by memory"])
@pytest.mark.parametrize("algorithm", [AllReduce(), Gossip(wire="fp32")], ids=repr)
def test_what_is_tied_travels_under_the_name_that_is_not_ignored(algorithm: Algorithm, tied: str, left: str) -> None:
    def train(rank: int) -> tuple[Tensor, Tensor]:
        model = tied_model(tied)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm, ignore=[left])
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 3), 1.0 + rank + step)).square().mean().backward()
            optimizer.step()
        replica.close(average=True)
        return model[0].weight.detach(), model[int(left)].bias.detach()

    if tied == "by memory" and isinstance(algorithm, AllReduce):
        other = {"0": "1", "1": "0"}[left]
        with pytest.raises(ConfigurationError, match=rf"leaves '{left}\.weight' to each rank, and not '{other}\.weight'"):
            loopback(train, 2)
        return
    (weight, own), (other_weight, other_own) = loopback(train, 2)
    assert torch.equal(weight, other_weight)
    assert not torch.equal(own, other_own), "its bias is left to each rank"
    gossamer.replicate(
        model := tied_model(tied), torch.optim.SGD(model.parameters(), lr=0.1), algorithm, ignore=["0.weight", "1.weight"]
    ).close()
