"""Settling where tensors are on a device: it keeps what was written, or what was there, and the host asks nothing."""

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, ChunkSparse, Hierarchical, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Cast
from gossamer.engine.exchange import Exchange
from gossamer.state import State

ALGORITHMS = [ScatterReduce(exact_vectors=False), PowerSGD(rank=1), ChunkSparse(chunk=8, density=0.5, codec=Cast(wire="fp32"))]


def trained(algorithm: Algorithm, broken: int | None) -> list[Tensor]:
    """Weights and residuals after steps of which one has a gradient that is not finite, and is not taken."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(16, 4, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            if step == broken:
                inputs = inputs * torch.inf
            model(inputs).square().sum().backward()
            if step != broken:
                optimizer.step()
        residuals = [flat for state in replica._gradients.exchange.states for _, flat in state.items()]  # type: ignore[union-attr]
        return torch.cat([model.weight.detach().reshape(-1), *residuals])

    return loopback(body, 3)


@pytest.mark.parametrize("broken", [None, 2])
@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=repr)
def test_it_ends_as_on_the_host(monkeypatch: pytest.MonkeyPatch, algorithm: Algorithm, broken: int | None) -> None:
    expected = trained(algorithm, broken)
    monkeypatch.setattr(Exchange, "_on_one_device", staticmethod(lambda tensors: True))
    monkeypatch.setattr(Exchange, "_checked", lambda self, exchange, *given: exchange(*given))
    for found, same in zip(trained(algorithm, broken), expected, strict=True):
        assert found.isfinite().all()
        assert torch.equal(found, same)


def test_a_value_to_go_back_to_may_have_more_bits() -> None:
    """It was loaded, from a run that kept it so."""
    state = State(torch.zeros(3))
    state.load({"residual": torch.tensor([1.0, 2.0, 3.0])})
    state["residual"] = torch.full((3,), torch.nan, dtype=torch.bfloat16)
    state.keep_where(torch.tensor([True]))
    assert state["residual"].tolist() == [1.0, 2.0, 3.0]
    assert state["residual"].dtype == torch.bfloat16


def test_a_machine_does_not_speak_for_the_others() -> None:
    """What its own payloads show to be finite is the mean of its own workers; that over all machines is written there."""
    algorithm = Hierarchical(AllReduce(), inner=ScatterReduce(gather_below=0), ranks_per_node=2)

    def body(rank: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(16, 64, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        unsent = []
        for step in range(4):
            optimizer.zero_grad()
            inputs = torch.randn(8, 16, generator=torch.Generator().manual_seed(10 * step + rank))
            model(inputs * torch.inf if (step, rank) == (3, 2) else inputs).square().sum().backward()
            if step < 3:
                optimizer.step()
            (kept,) = replica.state_dict()[f"rank{rank}"][0].values()
            unsent.append(kept["weight"].clone())
        assert not model.weight.grad.isfinite().all()  # type: ignore[union-attr]
        return unsent[2:]

    for before, after in loopback(body, 4):
        assert before.count_nonzero() > 0
        assert torch.equal(before, after)


def test_what_has_no_value_to_go_back_to_becomes_zero() -> None:
    state = State(torch.zeros(3))
    state["new"] = torch.full((3,), torch.nan)
    state.set_extra("factor", torch.full((2, 2), torch.inf), "owner")
    state.set_extra("number", torch.tensor(torch.nan))
    state.keep_where(torch.tensor([True]))
    state.commit()
    assert state.extra("number") == 0
    assert torch.count_nonzero(state["new"]) == 0
    assert torch.count_nonzero(state.extra("factor", "owner")) == 0  # type: ignore[arg-type]
