"""With ``synchronize="step"`` gradients that passes have accumulated are exchanged once, when a step begins; with a number, in
the last of so many passes."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import gossamer
from gossamer import AllReduce, Gossip, ScatterReduce, loopback

WORLD, PASSES, STEPS = 3, 4, 5


def batch(step: int, number: int) -> Tensor:
    return torch.randn(2, 6, generator=torch.Generator().manual_seed(100 * step + number), dtype=torch.float64)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 1)).double()


def alone(clip: float) -> Tensor:
    """One worker on all batches."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(STEPS):
        optimizer.zero_grad()
        model(torch.cat([batch(step, number) for number in range(WORLD * PASSES)])).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def accumulated(rank: int, clip: float, **options: Any) -> tuple[Tensor, int, float]:
    """The weights, the exchanges that were counted, and the messages of the last step."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    replica = gossamer.replicate(model, optimizer, synchronize="step", **options)
    for step in range(STEPS):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        for number in range(PASSES):
            (model(batch(step, PASSES * rank + number)).square().mean() / PASSES).backward()
        if clip < 1e9:
            replica.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    sent = replica.metrics()["messages_sent_last_step"]
    replica.close(average=True)
    return nn.utils.parameters_to_vector(model.parameters()).detach(), replica.step, sent


@pytest.mark.parametrize("clip", [0.05, 1e9])
def test_equals_one_worker_and_exchanges_once_per_step(clip: float) -> None:
    for weights, exchanges, sent in loopback(lambda rank: accumulated(rank, clip), WORLD):
        torch.testing.assert_close(weights, alone(clip), rtol=0, atol=1e-12)
        assert exchanges == STEPS
        assert sent == 1, "one bucket, gathered by all"


def test_a_number_of_passes_is_what_no_sync_around_all_but_the_last_is() -> None:
    """The same bits, also of what is compressed; and the exchange runs in the last pass."""

    def body(rank: int, number: int | None) -> tuple[Tensor, list[int]]:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, ScatterReduce(gather_below=0), synchronize=number)
        after = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for place in range(PASSES):
                with replica.no_sync() if number is None and place < PASSES - 1 else nullcontext():
                    model(batch(step, PASSES * rank + place)).square().mean().backward()
                after.append(replica.step)
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach(), after

    by_hand, counted = (loopback(lambda rank, n=n: body(rank, n), WORLD) for n in (None, PASSES))
    for (one, exchanges), (other, others) in zip(by_hand, counted, strict=True):
        assert torch.equal(one, other)
        assert exchanges == others == [each for step in range(STEPS) for each in (step, step, step, step + 1)]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_passes_inside_a_pass_are_not_counted() -> None:
    """Reentrant checkpointing: each micro-batch is one pass, however many run inside it."""

    def body(rank: int) -> list[int]:
        model = Checkpointed()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, synchronize=3)
        after = []
        for number in range(6):
            model(batch(number, rank).requires_grad_()).sum().backward()
            after.append(replica.step)
            if number == 2:
                optimizer.step()
        return after

    assert loopback(body, 2) == [[0, 0, 1, 1, 1, 2]] * 2


class Checkpointed(nn.Module):
    """Two checkpointed parts, and one between them that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()

    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.parts[0], x, use_reentrant=True)
        return checkpoint(self.parts[2], self.parts[1](x), use_reentrant=True)


@pytest.mark.parametrize("passes", [(4, 4), (1, 1), (4, 3), (4, 0)])
def test_what_a_step_with_fewer_passes_has_left_is_exchanged_when_it_begins(passes: tuple[int, int]) -> None:
    """Also where only some ranks have fewer, or none."""

    def body(rank: int) -> tuple[Tensor, int]:
        model = nn.Linear(1, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, synchronize=4)
        before = model.weight.detach().clone()
        for _ in range(3):
            optimizer.zero_grad()
            for _ in range(passes[rank]):
                model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
        return before - model.weight.detach(), replica.step

    for moved, exchanges in loopback(body, 2):
        assert moved.item() == pytest.approx(3 * sum(passes) / 2)
        assert exchanges == 3


def test_what_is_not_sent_yet_is_kept_once_per_step() -> None:
    """As many exchanges as with one pass of the same gradient: the same residuals, and the same bits."""

    def one_pass(rank: int) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, ScatterReduce(gather_below=0))
        for step in range(STEPS):
            optimizer.zero_grad()
            with replica.no_sync():
                model(batch(step, 2 * rank)).square().mean().backward()
            model(batch(step, 2 * rank + 1)).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    def at_step(rank: int) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        gossamer.replicate(model, optimizer, ScatterReduce(gather_below=0), synchronize="step")
        for step in range(STEPS):
            optimizer.zero_grad()
            for number in range(2):
                model(batch(step, 2 * rank + number)).square().mean().backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    for one, other in zip(loopback(one_pass, WORLD), loopback(at_step, WORLD), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-3)


def test_two_optimizers_that_step_after_one_pass_share_its_exchange() -> None:
    def body(rank: int) -> tuple[int, int]:
        model = network()
        first, second = (torch.optim.SGD(module.parameters(), lr=0.1) for module in (model[0], model[2]))
        replica = gossamer.replicate(model, [first, second], synchronize="step")
        model(batch(0, rank)).sum().backward()
        first.step()
        second.step()
        together = replica.step
        for optimizer in (first, second):  # each with a pass of its own
            model(batch(1, rank)).sum().backward()
            optimizer.step()
        return together, replica.step

    assert loopback(body, 2) == [(1, 3)] * 2


def test_gradients_written_without_a_hook_are_exchanged() -> None:
    def body(rank: int) -> Tensor:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        gossamer.replicate(model, optimizer, synchronize="step")
        before = model.weight.detach().clone()
        model.weight.grad = torch.full((1, 2), float(rank))
        optimizer.step()
        return before - model.weight.detach()

    for moved in loopback(body, 3):
        torch.testing.assert_close(moved, torch.ones(1, 2))


def test_buffers_are_broadcast_once_per_step() -> None:
    def body(rank: int) -> list[float]:
        model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, synchronize="step")
        seen = []
        for number in range(3):
            model(batch(0, 3 * rank + number)).sum().backward()
            seen.append(float(model[1].running_mean[0]))
        optimizer.step()
        model(batch(1, 0))
        return [*seen, float(model[1].running_mean[0])]

    first, second = loopback(body, 2)
    assert first[1:3] != second[1:3], "inside of a step they are each rank's own"
    assert first[3] == second[3]


def test_a_rank_without_a_gradient_takes_the_mean_of_the_others() -> None:
    """As an expert to which nothing was routed; and where nobody has one, none comes of it."""

    def body(rank: int) -> tuple[Tensor, bool]:
        model = nn.Linear(2, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        gossamer.replicate(model, optimizer, synchronize="step")
        before = model.weight.detach().clone()
        if rank == 1:
            model(torch.full((1, 2), 3.0)).sum().backward()
        optimizer.step()
        moved = before - model.weight.detach()
        optimizer.zero_grad()
        optimizer.step()
        return moved, model.weight.grad is None

    for moved, none in loopback(body, 3):
        torch.testing.assert_close(moved, torch.ones(1, 2))
        assert none


def test_a_closure_is_refused() -> None:
    def body(rank: int) -> None:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        gossamer.replicate(model, optimizer, synchronize="step")
        with pytest.raises(gossamer.UsageError, match="closure"):
            optimizer.step(lambda: 0.0)

    loopback(body, 2)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"synchronize": "never"}, "'backward', 'step' or a number of passes"),
        ({"synchronize": 0}, "number of passes; got 0"),
        ({"synchronize": True}, "number of passes; got True"),
        ({"synchronize": 4, "overlap_forward": True}, "synchronize=4 cannot be used: overlap_forward"),
        ({"synchronize": "step", "scaler": torch.amp.GradScaler("cpu")}, "GradScaler"),
        ({"synchronize": "step", "overlap_forward": True}, "overlap_forward"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], reason: str) -> None:
    model = network()
    with pytest.raises(gossamer.ConfigurationError, match=reason):
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), AllReduce(), **options)


def test_weights_are_exchanged_as_ever() -> None:
    def body(rank: int, synchronize: Any) -> Tensor:
        model = network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, Gossip(), synchronize=synchronize)
        for step in range(STEPS):
            optimizer.zero_grad()
            model(batch(step, rank)).square().mean().backward()
            optimizer.step()
        replica.close()
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    usual, at_step = (loopback(lambda rank, when=when: body(rank, when), 2) for when in ("backward", "step"))
    assert all(map(torch.equal, usual, at_step))
