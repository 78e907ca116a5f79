"""Passes that no step was taken for: nothing of them is sent later, nor saved."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from gossamer import ChunkSparse, Hierarchical, PowerSGD, ScatterReduce, loopback
from gossamer.algorithms import Algorithm
from gossamer.codecs import Cast, Quantize, Sign

WORLD = 3
COARSE = ScatterReduce(codec=Quantize(bits=2), residual="fp32")
KEEP_RESIDUALS = [
    ChunkSparse(chunk=2, density=0.2, codec=Cast(wire="fp32"), residual="fp32"),
    PowerSGD(residual="fp32"),
    ScatterReduce(codec=Sign(), gather_below=0, residual="fp32"),
    Hierarchical(COARSE, inner=COARSE, ranks_per_node=2),
]


def random(step: int, turn: int, rank: int) -> Tensor:
    return torch.randn(8, 8, generator=torch.Generator().manual_seed(100 * step + 10 * turn + rank))


TURNS = {"in turn": [0, 1], "two critics' turns": [0, 0, 1], "two generators' turns": [0, 1, 1]}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("order", TURNS.values(), ids=TURNS.keys())
@pytest.mark.parametrize("algorithm", KEEP_RESIDUALS, ids=repr)
def test_what_the_other_ones_pass_gave_leaves_nothing_unsent(algorithm: Algorithm, order: list[int], accumulates: bool) -> None:
    """The second's gradients pass through the first one's parameters, as a generator's through its discriminator. Each clears
    its own just before its pass.

    At the end of each one's own turn, what was applied and what is unsent is all that was given. ``accumulates``: half of each
    gradient comes from a pass inside ``no_sync()``.
    """

    def body(rank: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        weights = nn.ParameterList([nn.Parameter(torch.zeros(8, 8)) for _ in range(2)])
        optimizers = [SGD([weight], lr=1.0) for weight in weights]
        replica = gossamer.replicate(weights, optimizers, algorithm)
        given, found = torch.zeros(2, 8, 8), []
        for step, turn in enumerate(order * 6):
            optimizers[turn].zero_grad()
            factor = random(step, turn, rank)

            def backward(turn: int = turn, factor: Tensor = factor, step: int = step) -> None:
                loss = (weights[turn] * factor).sum()
                if turn == 1:
                    loss = loss + (weights[0] * random(step, 2, rank)).sum()
                (loss / 2 if accumulates else loss).backward()

            if accumulates:
                with replica.no_sync():
                    backward()
            backward()
            given[turn] += factor
            optimizers[turn].step()
            found.append((-weights[turn].detach().clone(), given[turn].clone(), unsent(replica, str(turn))))
        return found

    for step in zip(*loopback(body, WORLD), strict=True):
        moved, given, kept = (torch.stack(each) for each in zip(*step, strict=True))
        torch.testing.assert_close(WORLD * moved[0] + kept.sum(0), given.sum(0), atol=2e-3, rtol=1e-3)


def unsent(replica: gossamer.Replica, name: str) -> Tensor:
    """What is unsent of this rank's gradient of a parameter."""
    assert replica._gradients is not None
    exchange = replica._gradients.exchange
    ((index, segment),) = [(b.index, s) for b in exchange.buckets for s in b.segments if s.name == name]
    given = exchange.handlers[index].hand_over(
        torch.zeros_like(exchange.buckets[index].flat), exchange.states[index], exchange.context(0)
    )
    return segment.view(given).clone()


@pytest.mark.parametrize("algorithm", KEEP_RESIDUALS, ids=repr)
def test_a_sum_of_passes_that_is_thrown_away_leaves_nothing_unsent(algorithm: Algorithm) -> None:
    """Of two passes whose gradients were added up, and not only of the second one."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        weight = nn.Parameter(torch.zeros(8, 8))
        optimizer = SGD([weight], lr=1.0)
        replica = gossamer.replicate(nn.ParameterList([weight]), optimizer, algorithm)
        for step in range(6):
            for number in range(3):
                if number == 2:
                    optimizer.zero_grad()
                (weight * random(step, number, rank)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return weight.detach(), unsent(replica, "0")

    moved, kept = (torch.stack(each) for each in zip(*loopback(body, WORLD), strict=True))
    given = sum(random(step, 2, rank) for step in range(6) for rank in range(WORLD))
    torch.testing.assert_close(kept.sum(0) - WORLD * moved[0], given, atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("algorithm", [KEEP_RESIDUALS[0], KEEP_RESIDUALS[1], COARSE], ids=repr)
def test_a_resumed_run_knows_nothing_of_gradients_that_nobody_used(algorithm: Algorithm, turn: int) -> None:
    """Saved after either one's turn, when the other one's pass may have left something: bit for bit as if not interrupted."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        def training() -> tuple[nn.ParameterList, list[SGD], gossamer.Replica]:
            weights = nn.ParameterList([nn.Parameter(torch.zeros(8, 8)) for _ in range(2)])
            optimizers = [SGD([weight], lr=1.0) for weight in weights]
            return weights, optimizers, gossamer.replicate(weights, optimizers, algorithm)

        def train(weights: nn.ParameterList, optimizers: list[SGD], steps: range) -> None:
            for step in steps:
                mine = step % 2
                optimizers[mine].zero_grad()
                loss = (weights[mine] * random(step, mine, rank)).sum()
                if mine == 1:
                    loss = loss + (weights[0] * random(step, 2, rank)).sum()
                loss.backward()
                optimizers[mine].step()

        weights, optimizers, replica = training()
        train(weights, optimizers, range(5 + turn))
        saved = copy.deepcopy((weights.state_dict(), replica.state_dict()))
        train(weights, optimizers, range(5 + turn, 16))
        replica.close()
        again, optimizers, replica = training()
        again.load_state_dict(saved[0])
        replica.load_state_dict(saved[1])
        train(again, optimizers, range(5 + turn, 16))
        return torch.stack([*weights]).detach(), torch.stack([*again]).detach()

    for through, resumed in loopback(body, WORLD):
        assert torch.equal(through, resumed)


MOMENTUM = ChunkSparse(chunk=2, density=0.5, momentum_correction=True)
"""The momenta of vectors must stay the same on all ranks: else their weights do not."""


def with_vectors() -> tuple[nn.Module, SGD, gossamer.Replica]:
    torch.manual_seed(0)
    model = nn.Linear(4, 6)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return model, optimizer, gossamer.replicate(model, optimizer, MOMENTUM)


def vector_of(model: nn.Module) -> Tensor:
    return model.bias.detach().clone()


def test_with_momentum_one_may_take_two_turns() -> None:
    """The other one's gradients lie in their bucket meanwhile, and are not added to."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        nets = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        optimizers = [SGD(net.parameters(), lr=0.1, momentum=0.5) for net in nets]
        gossamer.replicate(nets, optimizers, MOMENTUM)
        for step, turn in enumerate([0, 0, 1] * 4):
            optimizers[turn].zero_grad()
            nets[turn](random(step, turn, rank)).square().mean().backward()
            optimizers[turn].step()
        return torch.cat([vector_of(net) for net in nets])

    found = loopback(body, WORLD)
    assert all(torch.equal(found[0], other) for other in found)


def test_a_probe_that_only_one_rank_makes_changes_nothing() -> None:
    """A rank that runs a pass of its own inside no_sync() forgets what all forget."""

    def body(rank: int) -> Tensor:
        model, optimizer, replica = with_vectors()
        for step in range(6):
            model(random(step, 0, rank)[:, :4]).square().mean().backward()
            if step % 2:
                optimizer.step()
            optimizer.zero_grad()
            if rank == 1:
                with replica.no_sync():
                    model(torch.ones(1, 4)).sum().backward()
                optimizer.zero_grad()
        return vector_of(model)

    found = loopback(body, WORLD)
    assert all(torch.equal(found[0], other) for other in found)


def test_what_the_last_rank_leaves_out_inside_join_is_not_undone_after_it() -> None:
    """The others, whose batches have ended, could not tell."""

    def body(rank: int) -> Tensor:
        model, optimizer, replica = with_vectors()
        with replica.join():
            for step in range(4 if rank == 0 else 2):
                optimizer.zero_grad()
                model(random(step, 0, rank)[:, :4]).square().mean().backward()
                if step < 3:
                    optimizer.step()
        for step in range(4, 6):
            optimizer.zero_grad()
            model(random(step, 0, rank)[:, :4]).square().mean().backward()
            optimizer.step()
        return vector_of(model)

    found = loopback(body, WORLD)
    assert all(torch.equal(found[0], other) for other in found)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_for_every_pass_needs_no_memory_for_the_way_back(overlap: bool) -> None:
    """There are the gradients, what is unsent, and what was unsent before, whose memory the next result takes."""

    def body(rank: int) -> list[int]:
        model = nn.Linear(64, 64, bias=False)
        optimizer = SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, ScatterReduce(), overlap_forward=overlap)
        assert replica._gradients is not None
        exchange, found = replica._gradients.exchange, []
        for step in range(12):
            model(torch.ones(1, 64) * (rank + step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            replica.state_dict() if step == 2 else replica.wait_for_exchanges()
            ledger = exchange.states[0].flats
            held = [each for part in (ledger.kept, ledger.draft, ledger.spare) for each in part.values()]
            found.append(len({each.data_ptr() for each in (exchange.buckets[0].flat, *held) if each is not None}))
        return found[4:]

    for found in loopback(body, 2):
        assert found == [3] * 8


class AgainstTheOrder(nn.Module):
    """Gradients come in another order than parameters are written in, so that the first pass shows another plan."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.discriminator = nn.Linear(8, 8, bias=False)
        self.generator = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.discriminator(self.generator(x))
        return out


def test_saving_after_the_very_first_pass_changes_nothing_and_holds_nothing_of_it() -> None:
    def body(rank: int, saves: bool) -> tuple[Tensor, list[str]]:
        model = AgainstTheOrder()
        generator, discriminator = (SGD(each.parameters(), lr=0.1) for each in (model.generator, model.discriminator))
        algorithm = ScatterReduce(codec=Quantize(bits=2), residual="fp32", bucket_bytes=1)
        replica = gossamer.replicate(model, [generator, discriminator], algorithm)
        model(random(0, 0, rank)).sum().backward()
        generator.step()
        state = replica.state_dict() if saves else {}
        generator.zero_grad()
        discriminator.zero_grad()
        model(random(1, 0, rank)).square().sum().backward()
        grad = model.discriminator.weight.grad
        assert grad is not None
        found = grad.clone()
        replica.close()
        return found, sorted(state[f"rank{rank}"][0].get("residual", {}) if saves else [])

    saved, unsaved = loopback(lambda rank: body(rank, True), 2), loopback(lambda rank: body(rank, False), 2)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(saved, unsaved, strict=True))
    assert [names for _, names in saved] == [["generator.weight"]] * 2
