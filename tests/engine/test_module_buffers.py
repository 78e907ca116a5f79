"""How buffers are kept together."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import gossamer
from gossamer import AllReduce, ConfigurationError, Gossip, loopback
from gossamer.comm.ops import all_reduce
from gossamer.engine import module_buffers
from gossamer.engine.hooks import OwnHook
from gossamer.engine.module_buffers import average, floating, hook_forward, named_buffers, resolve_buffers

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


def seen_in_forward(rank: int, algorithm: gossamer.Algorithm, buffers: Any, use: Callable[[nn.Module], Any]) -> float:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3, momentum=0.0))
    replica = gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), algorithm, buffers=buffers)
    model[1].running_mean.fill_(float(rank))
    use(model)
    found = model[1].running_mean[0].item()
    replica.close()
    return found


def forward(model: nn.Module) -> None:
    model(torch.randn(4, 2))


def evaluate(model: nn.Module) -> None:
    model.eval()(torch.randn(4, 2))


def without_gradient(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.randn(4, 2))


@pytest.mark.parametrize("use", [forward, evaluate, without_gradient])
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
def test_modes(algorithm: gossamer.Algorithm, buffers: Any, expected: list[float], use: Callable[[nn.Module], Any]) -> None:
    found = loopback(lambda rank: seen_in_forward(rank, algorithm, buffers, use), 3)
    assert found == (expected if use is forward else [0, 1, 2])


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


def test_the_hook_stays_behind_when_a_model_is_copied_or_saved() -> None:
    calls: list[int] = []
    model = nn.Linear(1, 1)
    hook_forward(model, lambda: calls.append(1))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert any(isinstance(hook, OwnHook) for hook in twin._forward_pre_hooks.values())
        twin(torch.zeros(1, 1))
    assert not calls
    model(torch.zeros(1, 1))
    assert calls == [1]
