"""Ranks with different numbers of batches."""

import pickle

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, DisagreementError, Gossip, GossipGraD, UsageError, loopback


def test_ranks_that_do_different_things_are_told() -> None:
    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model]
        replica = gossamer.replicate(model, optimizers, Gossip())
        with replica.join():
            model(torch.ones(4, 2)).sum().backward()
            optimizers[rank > 0].step()

    with pytest.raises(UsageError, match=r"inside join\(\): the step of optimizer 0, the step of optimizer 1"):
        loopback(body, 3)


@pytest.mark.parametrize("counts", [(2, 2, 2), (3, 1, 2)])
def test_local_buffers_stay_local(counts: tuple[int, ...]) -> None:
    def body(rank: int) -> tuple[list[float], Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, AllReduce(), buffers="local")
        expected = nn.BatchNorm1d(2)
        with replica.join():
            for number in range(counts[rank]):
                inputs = torch.randn(4, 2, generator=torch.Generator().manual_seed(10 * rank + number))
                expected(inputs)
                optimizer.zero_grad()
                model(inputs).sum().backward()
                optimizer.step()
        assert torch.equal(model[0].running_mean, expected.running_mean)
        assert model[0].num_batches_tracked == counts[rank]
        return model[0].running_mean.tolist(), model[1].weight.detach()

    found = loopback(body, 3)
    assert len({tuple(mean) for mean, _ in found}) == 3
    assert all(torch.equal(weight, found[0][1]) for _, weight in found)


@pytest.mark.parametrize("counts", [(3, 0, 1), (0, 0, 0), (2, 2, 2), (0, 4, 4)])
@pytest.mark.parametrize("algorithm", [AllReduce(bucket_bytes=8), Gossip(bucket_bytes=8)], ids=repr)
def test_any_number_of_batches(counts: tuple[int, ...], algorithm: gossamer.Algorithm) -> None:
    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(2):
            with replica.join():
                for _ in range(counts[rank]):
                    optimizer.zero_grad()
                    model(torch.randn(4, 2, dtype=torch.float64)).square().mean().backward()
                    optimizer.step()
        assert replica.step == 2 * max(counts)
        with replica.consensus():
            return torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    found = loopback(body, 3)
    assert all(torch.equal(found[0], other) for other in found)


def test_nobody_is_asked_for_an_average_inside() -> None:
    """A rank that has ended would not take part; it is refused before that depends on who has."""

    def body(rank: int) -> None:
        model = nn.Linear(2, 1)
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), Gossip())
        with replica.join():
            with pytest.raises(UsageError, match=r"consensus\(\) inside join\(\)"), replica.consensus():
                pass
            with pytest.raises(UsageError, match=r"consensus_distance\(\) inside join\(\)"):
                replica.consensus_distance()
        assert replica.consensus_distance() < 1e-6

    loopback(body, 2)


def test_the_mean_is_over_all_ranks() -> None:
    """A rank that has ended counts with a zero gradient, as in DDP's join."""

    def body(rank: int) -> list[float]:
        model = nn.Linear(1, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer)
        seen = []
        with replica.join():
            for _ in range(1 if rank == 0 else 2):
                optimizer.zero_grad()
                (model.weight * 4).sum().backward()
                seen.append(model.weight.grad.item())
                optimizer.step()
        return [*seen, model.weight.item()]

    assert loopback(body, 4) == [[4.0, -7.0]] + [[4.0, 3.0, -7.0]] * 3


def test_an_error_inside_is_told_to_all() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(1, 1)
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=1.0))
        with replica.join():
            if rank == 1:
                raise ArithmeticError("the user's own")

    with pytest.raises(ArithmeticError):
        loopback(body, 3)


def test_optimizers_are_equal_again_and_so_are_the_steps_after_it() -> None:
    """A rank whose data ended had no gradients for its moments."""

    def body(rank: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer)
        for count in (3 - rank, 2):
            with replica.join():
                for _ in range(count):
                    optimizer.zero_grad()
                    model(torch.randn(4, 3)).square().mean().backward()
                    optimizer.step()
        moments = torch.cat([value.reshape(-1) for state in optimizer.state.values() for value in state.values()])
        return moments.tolist(), torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    found = loopback(body, 3)
    assert found[0][0], "it remembers something"
    assert found == [found[0]] * 3


def uneven(optimizer_class: type[torch.optim.Optimizer], **options: object) -> list[list[float]]:
    """The weights of two ranks with one and three batches, and one more on both."""

    def body(rank: int) -> list[float]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = optimizer_class(model.parameters(), lr=0.1, **options)
        replica = gossamer.replicate(model, optimizer)
        for count in (1 + 2 * rank, 1):
            with replica.join():
                for _ in range(count):
                    optimizer.zero_grad()
                    model(torch.randn(4, 3)).square().mean().backward()
                    optimizer.step()
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()

    return loopback(body, 2)


def test_nothing_is_unpickled_from_what_ranks_send(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("unpickled")

    for module, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(module, name, refuse)
    first, second = uneven(torch.optim.AdamW, amsgrad=True)
    assert first == second


class Remembers(torch.optim.SGD):
    """Keeps an object of the user's beside its numbers."""

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"history": [object()]}


def test_an_optimizer_that_keeps_objects_is_refused_on_every_rank() -> None:
    with pytest.raises(UsageError, match=r"rank \d: .*the state of Remembers of rank 1 .*state\['history'\]\[0\] is a object"):
        uneven(Remembers)


def test_a_scaler_and_join_are_refused() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    replica = gossamer.replicate(model, optimizer, scaler=torch.amp.GradScaler("cpu"))
    with pytest.raises(UsageError, match="scaler"), replica.join():
        pass


def test_workers_of_a_machine_that_would_end_apart_are_refused() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(1, 1)
        replica = gossamer.replicate(
            model, torch.optim.SGD(model.parameters(), lr=1.0), gossamer.Hierarchical(Gossip(), ranks_per_node=2)
        )
        with replica.join():
            pass

    with pytest.raises(UsageError, match="both gradients and weights"):
        loopback(body, 4)


def test_histories_of_a_rank_without_any_batch_are_refused_with_the_reason() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, GossipGraD())
        with replica.join():
            for _ in range(2 * rank):
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()

    with pytest.raises(DisagreementError, match=r"rank 0: nothing; .*no batch before .*history=False"):
        loopback(body, 2)
