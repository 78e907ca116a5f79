"""How buffers are kept together."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, ConfigurationError, Gossip, loopback
from gossamer.comm.ops import all_reduce
from gossamer.engine import module_buffers
from gossamer.engine.module_buffers import average, floating, named_buffers, resolve_buffers

from ..contracts.cases import own_runner


def test_defaults() -> None:
    assert resolve_buffers(None, "gradients") == "broadcast"
    assert resolve_buffers(None, "weights") == "average"
    assert resolve_buffers("local", "weights") == "local"
    with pytest.raises(ConfigurationError, match="broadcast, average, local; got 'none'"):
        resolve_buffers("none", "gradients")  # type: ignore[arg-type]


def test_names_are_those_of_the_uncompiled_model() -> None:
    """A checkpoint of one is loaded into the other."""
    model = nn.Sequential(nn.BatchNorm1d(3))
    assert list(named_buffers(torch.compile(model))) == list(named_buffers(model))  # type: ignore[arg-type]


def test_what_can_be_averaged() -> None:
    model = nn.BatchNorm1d(3)
    assert list(named_buffers(model)) == ["running_mean", "running_var", "num_batches_tracked"]
    assert list(floating(named_buffers(model))) == ["running_mean", "running_var"]


def left_by(rank: int, algorithm: gossamer.Algorithm, buffers: Any, use: Callable[[nn.Module, gossamer.Replica], Any]) -> float:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=0.0))
    replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, buffers=buffers)
    model[1].running_mean.fill_(float(rank))
    use(model, replica)
    found = model[1].running_mean[0].item()
    replica.close()
    return found


def backward(model: nn.Module, replica: gossamer.Replica) -> None:
    model(torch.randn(4, 2)).sum().backward()


def backward_apart(model: nn.Module, replica: gossamer.Replica) -> None:
    with replica.no_sync():
        model(torch.randn(4, 2)).sum().backward()


def forward(model: nn.Module, replica: gossamer.Replica) -> None:
    model(torch.randn(4, 2))


def evaluate(model: nn.Module, replica: gossamer.Replica) -> None:
    model.eval()(torch.randn(4, 2))


def without_gradient(model: nn.Module, replica: gossamer.Replica) -> None:
    with torch.no_grad():
        model(torch.randn(4, 2))


@pytest.mark.parametrize("use", [backward, backward_apart, forward, evaluate, without_gradient])
@pytest.mark.parametrize(
    ("algorithm", "buffers", "expected"),
    [
        (AllReduce(), None, [0, 0, 0]),
        (AllReduce(), "average", [1, 1, 1]),
        (AllReduce(), "local", [0, 1, 2]),
        (Gossip(), "broadcast", [0, 0, 0]),
        (Gossip(), None, [0, 1, 2]),
        (Gossip(), "local", [0, 1, 2]),
    ],
)
def test_modes(
    algorithm: gossamer.Algorithm,
    buffers: Any,
    expected: list[float],
    use: Callable[[nn.Module, gossamer.Replica], Any],
) -> None:
    """Buffers are synchronised at the end of a synchronised backward pass, and nowhere else."""
    found = loopback(lambda rank: left_by(rank, algorithm, buffers, use), 3)
    assert found == (expected if use is backward else [0, 1, 2])


@pytest.mark.parametrize("buffers", ["broadcast", "average"])
def test_between_steps_one_batch_evaluates_to_one_value_on_all_ranks(buffers: Any) -> None:
    """A plain ``model.eval()``, without ``consensus()``; rank 0's statistics, or the mean of all."""

    def body(rank: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, buffers=buffers)
        found = []
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.randn(16, 4) * (1 + 3 * rank)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                found.append(model.eval()(torch.ones(1, 4)))
            model.train()
        return found

    first, second = loopback(body, 2)
    assert all(map(torch.equal, first, second))
    assert not torch.equal(first[0], first[-1])


class Centred(nn.Module):
    """Its training forward reads a buffer, and writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("center", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)
        loss = (y - self.center).square().mean()
        if self.training:
            self.center.mul_(0.9).add_(y.detach().mean(0), alpha=0.1)
        return loss


@pytest.mark.parametrize("micro", [1, 3])
def test_forward_reads_the_buffers_that_ddp_gives_it(micro: int) -> None:
    """Every rank's batches begin with rank 0's buffers as these are after the last synchronised pass; inside ``no_sync()`` each
    rank goes on with its own."""

    def batch(rank: int, step: int, number: int) -> torch.Tensor:
        return torch.randn(5, 3, generator=torch.Generator().manual_seed(100 * step + 10 * rank + number)) + rank

    def body(rank: int) -> torch.Tensor:
        torch.manual_seed(0)
        model = Centred()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer)
        for step in range(4):
            optimizer.zero_grad()
            for number in range(micro):
                if number < micro - 1:
                    with replica.no_sync():
                        (model(batch(rank, step, number)) / micro).backward()
                else:
                    (model(batch(rank, step, number)) / micro).backward()
            optimizer.step()
        return torch.cat([model.layer.weight.detach().reshape(-1), model.center])

    torch.manual_seed(0)
    model = Centred()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        optimizer.zero_grad()
        begin, first = model.center.clone(), torch.zeros(3)
        for rank in range(2):
            model.center.copy_(begin)
            for number in range(micro):
                (model(batch(rank, step, number)) / micro / 2).backward()
            first = model.center.clone() if rank == 0 else first
        model.center.copy_(first)
        optimizer.step()
    expected = torch.cat([model.layer.weight.detach().reshape(-1), model.center])
    for found in loopback(body, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_a_compiled_model_with_synchronised_buffers_is_one_graph() -> None:
    def body(rank: int) -> list[float]:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer)
        compiled = torch.compile(model, fullgraph=True, backend="eager")
        for _ in range(2):
            optimizer.zero_grad()
            compiled(torch.randn(4, 2) + rank).sum().backward()
            optimizer.step()
        found: list[float] = model[1].running_mean.tolist()
        return found

    first, second = loopback(body, 2)
    assert first == second
    assert any(first)


def test_steps_without_a_backward_pass_are_told_that_no_buffers_travel(caplog: pytest.LogCaptureFixture) -> None:
    """Gradients that are computed in another way, as weight algorithms allow it."""

    def body(rank: int) -> None:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, Gossip(), buffers="broadcast")
        for _ in range(3):
            gradients = torch.autograd.grad(model(torch.randn(4, 2)).sum(), list(model.parameters()))
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.grad = gradient
            optimizer.step()

    loopback(body, 2)
    told = [record.getMessage() for record in caplog.records if "buffers" in record.getMessage()]
    assert len(told) == 2
    assert all("buffers='local'" in text for text in told)


def test_averages_travel_with_the_weights() -> None:
    def body(rank: int) -> float:
        model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=0.0))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        gossamer.replicate(model, optimizer, Gossip(wire="fp32"))
        model[1].running_mean.fill_(float(rank))
        for _ in range(3):
            model(torch.randn(4, 2)).sum().backward()
            optimizer.step()
        return model[1].running_mean[0].item()

    assert loopback(body, 4) == [1.5] * 4


@pytest.mark.parametrize("portion", [module_buffers.PORTION, 48, 8])
def test_the_mean_goes_in_portions(portion: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no copy of everything is needed. Tensors without gaps and with some, of one type and of others."""
    monkeypatch.setattr(module_buffers, "PORTION", portion)
    sizes = []

    def watched(tensor: torch.Tensor) -> Any:
        sizes.append(tensor.nbytes)
        return all_reduce(tensor)

    monkeypatch.setattr(module_buffers, "all_reduce", watched)

    def body(rank: int) -> list[torch.Tensor]:
        wide, narrow = torch.arange(30.0).reshape(5, 6) * rank, torch.full((9,), float(rank), dtype=torch.bfloat16)
        tensors = [wide[0], wide.T[3:], torch.full((2,), 1.0 + rank, dtype=torch.float64), narrow]
        average(own_runner(), tensors)
        return tensors

    whole = torch.arange(30.0).reshape(5, 6)
    for found in loopback(body, 3):
        expected = whole[0], whole.T[3:], torch.full((2,), 2.0, dtype=torch.float64), torch.ones(9, dtype=torch.bfloat16)
        assert all(map(torch.equal, found, expected))
    assert max(sizes) <= portion
    assert sum(sizes) == 3 * (4 * 21 + 2 * 8 + 9 * 4)


def test_numbers_of_8_bits_are_left_alone() -> None:
    def body(rank: int) -> None:
        model = nn.Linear(2, 2)
        model.register_buffer("scale", torch.ones(2).to(torch.float8_e4m3fn))
        replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), Gossip())
        assert replica.consensus_distance() == 0.0
        with replica.consensus():
            assert torch.equal(model.scale.float(), torch.ones(2))
        replica.close(average=True)

    loopback(body, 2)


class Assigns(nn.Module):
    """A mask with infinities, and a buffer that each forward replaces by a new tensor."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mask", torch.full((2, 2), -float("inf")).triu(1))
        self.register_buffer("center", torch.zeros(2))
        self.rank = rank

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.center = self.center * 0 + float(self.rank)
        return torch.softmax(self.layer(x) + self.mask, -1)


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_masks_survive_gossip_and_assigned_buffers_are_followed(wire: Any) -> None:
    def body(rank: int) -> float:
        model = Assigns(rank)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip(wire=wire))
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 2)).square().sum().backward()
            optimizer.step()
        assert torch.equal(model.mask, torch.full((2, 2), -float("inf")).triu(1))
        with replica.consensus():
            assert torch.equal(model.mask, torch.full((2, 2), -float("inf")).triu(1))
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        replica.close()
        return model.center[0].item()

    assert loopback(body, 2) == [0.5, 0.5]
