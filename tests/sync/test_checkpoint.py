"""A state that was saved by another number of ranks: nothing that was not sent yet is lost."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ChunkSparse, Gossip, Hierarchical, PowerSGD, ScatterReduce, after, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Quantize
from gossamer.errors import ConfigurationError


def training(algorithm: Algorithm) -> tuple[nn.Module, torch.optim.Optimizer, gossamer.Replica]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return model, optimizer, gossamer.replicate(model, optimizer, algorithm)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    inputs = torch.randn(8, 40, generator=torch.Generator().manual_seed(seed))
    optimizer.zero_grad()
    model(inputs).square().mean().backward()
    optimizer.step()


def saved(algorithm: Algorithm, world: int) -> dict[str, Any]:
    """The merged states of ``world`` ranks after three steps."""

    def run(rank: int) -> dict[str, Any]:
        model, optimizer, replica = training(algorithm)
        for number in range(3):
            step(model, optimizer, 10 * number + rank)
        state = copy.deepcopy(replica.state_dict())
        replica.close()
        return state

    merged: dict[str, Any] = {}
    for state in loopback(run, world):
        merged |= state
    return merged


def reloaded(algorithm: Algorithm, state: dict[str, Any], world: int) -> list[dict[str, Any]]:
    """What each of ``world`` ranks holds after loading ``state``; then they train on."""

    def run(rank: int) -> dict[str, Any]:
        model, optimizer, replica = training(algorithm)
        replica.load_state_dict(state)
        mine = copy.deepcopy(replica.state_dict())[f"rank{rank}"]
        step(model, optimizer, rank)
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        replica.close()
        return mine

    return loopback(run, world)


def mean(entries: list[dict[str, dict[str, Tensor]]], key: str, name: str) -> Tensor:
    held = [entry[key][name].double() for entry in entries if key in entry]
    return torch.stack(held).sum(0) / len(entries)


algorithms = pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        (ScatterReduce(codec=Quantize(bits=2)), ["residual"]),
        (ChunkSparse(density=0.3, chunk=16, momentum_correction=False), ["residual"]),
        (PowerSGD(rank=1), ["residual"]),
    ],
)


@algorithms
@pytest.mark.parametrize(("before", "now"), [(4, 2), (2, 4), (3, 5), (5, 3), (3, 1), (1, 3)])
def test_the_mean_of_what_was_not_sent_stays(algorithm: Algorithm, keys: list[str], before: int, now: int) -> None:
    state = saved(algorithm, before)
    with pytest.warns(UserWarning, match=f"a state of {before} ranks is loaded by {now}"):
        after = reloaded(algorithm, state, now)
    for key in keys:
        for name, had in state["rank0"][key].items():
            kept, expected = mean(after, key, name), mean([state[f"rank{rank}"] for rank in range(before)], key, name)
            assert kept.shape == had.shape
            torch.testing.assert_close(kept, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("before", "now"), [(8, 3), (4, 5), (6, 2)])
def test_leaders_of_before_still_send_what_they_owe(before: int, now: int) -> None:
    """Whoever leads a machine now: all that was owed to the mean, in one exact step at the next change."""
    algorithm = after(4, AllReduce(), before=Hierarchical(ScatterReduce(codec=Quantize(bits=2)), ranks_per_node=2))
    state = saved(algorithm, before)
    owed = {
        name: 2 * sum(state[f"rank{rank}"][key][name] for rank in range(before) if key in state[f"rank{rank}"]) / before
        for key, tensors in state["rank0"].items()
        if key.endswith("outer: residual")
        for name in tensors
    }
    assert owed

    def run(rank: int) -> dict[str, Tensor]:
        model, optimizer, replica = training(algorithm)
        replica.load_state_dict(state)
        start = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(3):
            optimizer.zero_grad()
            sum(p.sum() * 0 for p in model.parameters()).backward()
            optimizer.step()
        replica.close()
        return {name: (start[name] - p.detach()) / 0.05 for name, p in model.named_parameters()}

    with pytest.warns(UserWarning, match="shared out"):
        moved = loopback(run, now)[0]
    for name, expected in owed.items():
        torch.testing.assert_close(moved[name], expected, rtol=1e-4, atol=1e-6)


def test_an_exchange_of_weights_begins_anew() -> None:
    state = saved(Gossip(), 3)
    with pytest.warns(UserWarning, match="begins anew"):
        assert all(not entry for entry in reloaded(Gossip(), state, 2))


def test_the_same_number_of_ranks_needs_no_warning() -> None:
    state = saved(ScatterReduce(), 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reloaded(ScatterReduce(), state, 2)


def test_missing_entries_are_named() -> None:
    state = saved(ScatterReduce(), 3)
    del state["rank1"]
    with pytest.raises(ConfigurationError, match=r"saved by 3 ranks, this run has 2; it holds no entry for rank 1: merge"):
        reloaded(ScatterReduce(), state, 2)
