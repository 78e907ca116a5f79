"""LocalSGD and DiLoCo: what each worker does alone, and what all make of it."""

import copy
from collections.abc import Callable, Sequence
from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    AllReduce,
    ChunkSparse,
    DiLoCo,
    Gossip,
    GossipGraD,
    Hierarchical,
    LocalSGD,
    PowerSGD,
    PushSum,
    ScatterReduce,
    after,
    by_size,
    in_parts,
    loopback,
    sparta,
    streaming_diloco,
)
from gossamer.algorithms import Algorithm
from gossamer.algorithms.blocks.outer import START, VELOCITY
from gossamer.codecs import Quantize
from gossamer.comm.topology import Complete
from gossamer.errors import ConfigurationError
from gossamer.optim import MasterWeights
from gossamer.pieces import cut

from ..contracts.cases import exchange, noise, stacked, weights

WORLD, STEPS, SIZE = 4, 13, 6


class Pull(nn.Module):
    """Each worker's loss pulls the weights to a place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, pull: float) -> Tensor:
        return ((self.weight - torch.arange(SIZE) * (1.0 + pull)) ** 2).sum()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)


def trained(algorithm: Algorithm, pulls: Sequence[float] = range(WORLD)) -> list[Tensor]:
    """The weights after each step, rank by rank: ``(steps, size)``."""

    def body(rank: int) -> Tensor:
        model = Pull()
        optimizer = inner(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        seen = []
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(pulls[rank]).backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
        replica.close(average=False)
        return torch.stack(seen)

    return loopback(body, len(pulls))


def reference(every: int, outer: Callable[[nn.Parameter], torch.optim.Optimizer] | None, delay: int = 1) -> Tensor:
    """The same in one loop, where nothing travels; the outer optimizer is one of torch's: ``(world, steps, size)``."""
    models = [Pull() for _ in range(WORLD)]
    optimizers, pending, seen = [inner(model) for model in models], None, []
    start = nn.Parameter(models[0].weight.detach().clone())
    optimizer = None if outer is None else outer(start)
    for step in range(STEPS):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            model(rank).backward()  # on weights from before what is pending
            if pending is not None:
                model.weight.data.copy_(pending)
            optimizers[rank].step()
        pending, own = None, torch.stack([model.weight.detach().clone() for model in models])
        seen.append(own)
        if (step + 1) % every == 0:
            pending = own.mean(0)
            if optimizer is not None:
                start.grad = start.detach() - pending
                optimizer.step()
                pending = start.detach().clone()
        if pending is not None and not delay:
            for model in models:
                model.weight.data.copy_(pending)
            seen[-1], pending = pending.expand_as(own), None
    return torch.stack(seen, 1)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("every", [1, 3])
def test_local_sgd_is_the_loop_in_one_process(every: int, delay: Literal[0, 1]) -> None:
    expected = reference(every, None, delay)
    torch.testing.assert_close(torch.stack(trained(LocalSGD(every=every, delay=delay))), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("delay", [0, 1])
@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize(("rate", "momentum"), [(0.7, 0.9), (1.0, 0.5), (0.4, 0.0)])
def test_the_outer_optimizer_is_torchs_sgd(
    every: int, nesterov: bool, rate: float, momentum: float, delay: Literal[0, 1]
) -> None:
    expected = reference(
        every, lambda start: torch.optim.SGD([start], lr=rate, momentum=momentum, nesterov=nesterov and momentum > 0), delay
    )
    algorithm = DiLoCo(every=every, rate=rate, momentum=momentum, nesterov=nesterov, delay=delay)
    torch.testing.assert_close(torch.stack(trained(algorithm)), expected, rtol=0, atol=1e-12)


def test_without_an_outer_momentum_and_with_rate_1_it_is_local_sgd() -> None:
    plain, outer = trained(LocalSGD(every=3)), trained(DiLoCo(every=3, rate=1.0, momentum=0.0))
    torch.testing.assert_close(torch.stack(outer), torch.stack(plain), rtol=0, atol=1e-12)


def test_averages_travel_in_parts_too() -> None:
    """Each part in a step of its own."""
    whole, parts = trained(LocalSGD(every=3)), trained(in_parts(3, LocalSGD(every=1)))
    differences = [(a - b).abs().max(0).values > 1e-9 for a, b in zip(whole, parts, strict=True)]
    assert not differences[0][:2].any(), "the first part is exchanged at the same steps"
    assert differences[0][2:].all()


def test_post_local_sgd() -> None:
    """Gradients are averaged for a while, and all are equal then; afterwards each goes alone."""
    first, second, *_ = trained(after(4, LocalSGD(every=8)))
    assert torch.equal(first[3], second[3])
    assert not torch.allclose(first[6], second[6], rtol=0, atol=1e-6)


def test_a_machine_is_one_worker_to_others() -> None:
    """Sites of two workers, which average their gradients in each step and hold the same weights."""
    ranks = trained(Hierarchical(DiLoCo(every=2), ranks_per_node=2))
    assert torch.equal(ranks[0], ranks[1])
    assert torch.equal(ranks[2], ranks[3])
    assert not torch.allclose(ranks[0], ranks[2], rtol=0, atol=1e-6)
    alone = trained(DiLoCo(every=2), pulls=[0.5, 2.5])  # each to the middle of what its machine's workers do
    torch.testing.assert_close(torch.stack(ranks[::2]), torch.stack(alone), rtol=0, atol=1e-12)


FOUR_BITS = ScatterReduce(codec=Quantize(bits=4), gather_below=0, residual="fp32")


def test_what_a_codec_loses_of_an_outer_delta_comes_later() -> None:
    """What was averaged, and what is unsent, is all that workers have learned."""
    steps = [noise(WORLD, 50, torch.float64, seed=step) for step in range(6)]
    outcomes = exchange(DiLoCo(rate=1.0, momentum=0.0, averaging=FOUR_BITS), steps)
    starts = [torch.stack(mine) + stacked(outcomes, step) for step, mine in enumerate(steps)]
    for start in starts:  # all begin again at the same weights, however coarse the wire
        assert (start - start[0]).abs().max() < 1e-14
    learned = sum((start[0] - torch.stack(mine)).sum(0) for start, mine in zip(starts[:-1], steps[1:], strict=True))
    unsent = sum(outcome.state["averaging residual"] for outcome in outcomes)
    assert unsent.abs().max() > 1e-3
    torch.testing.assert_close(WORLD * (starts[0][0] - starts[-1][0]) + unsent, learned, rtol=0, atol=1e-12)


def test_what_its_averaging_leaves_exact_is_exact() -> None:
    algorithm = DiLoCo(averaging=FOUR_BITS)
    matrix, vector = torch.zeros(3, 3), torch.zeros(3)
    assert algorithm.route("a", matrix).averaging == FOUR_BITS
    assert isinstance(algorithm.route("a", vector).averaging, AllReduce)


def test_a_matrix_that_is_cut_into_parts_is_one() -> None:
    algorithm = in_parts(4, DiLoCo(every=1, averaging=FOUR_BITS))
    pieces = cut({"matrix": torch.zeros(10, 10), "vector": torch.zeros(30)}, 4)
    handlers = {name: algorithm.route(name, piece) for name, piece in pieces.items()}
    assert len(handlers) > 4
    for name, handler in handlers.items():
        assert (handler.algorithm.averaging == FOUR_BITS) == name.startswith("matrix")


def test_weights_that_a_checkpoint_did_not_know_begin_where_all_are() -> None:
    """They were frozen when it was saved: where all begin is no zero, to which an outer optimizer would take them."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        model[1].requires_grad_(False)
        saved: dict = {}
        for _ in range(2):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
            replica = gossamer.replicate(model, optimizer, DiLoCo(every=2))
            if saved:
                replica.load_state_dict(saved)
            for _ in range(9):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
            saved = replica.state_dict()
            replica.close()
            model.requires_grad_(True)
        torch.manual_seed(0)
        fresh = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        return weights(model), weights(fresh)

    for ended, begun in loopback(body, 2):
        torch.testing.assert_close(ended, begun, rtol=0, atol=1e-6)


def test_weights_that_are_loaded_before_the_first_step_are_where_all_begin() -> None:
    """As those of a pretrained model, on all ranks, after ``replicate()``: no outer step leads there."""

    def body(rank: int) -> Tensor:
        model = Pull()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=1, delay=0))
        model.load_state_dict({"weight": torch.arange(float(SIZE), dtype=torch.float64)})
        for _ in range(3):
            model(rank).backward()
            optimizer.step()
        replica.close()
        return weights(model)

    for ended in loopback(body, 2):
        assert torch.equal(ended, torch.arange(float(SIZE), dtype=ended.dtype))


@pytest.mark.parametrize("saved", [0, 1, 2, 5])
@pytest.mark.parametrize("algorithm", [LocalSGD(every=2, delay=0), DiLoCo(every=2), DiLoCo(every=2, delay=0)], ids=repr)
def test_a_resumed_run_goes_on_from_where_all_began(algorithm: Algorithm, saved: int) -> None:
    """Bit by bit, whether or not the first exchange had come."""

    def body(rank: int, stop: bool) -> Tensor:
        model = Pull()
        optimizer = inner(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(7):
            if stop and step == saved:
                states = [copy.deepcopy(part.state_dict()) for part in (model, optimizer, replica)]
                replica.close()
                model = Pull()
                optimizer = inner(model)
                replica = gossamer.replicate(model, optimizer, algorithm)
                for part, state in zip((model, optimizer, replica), states, strict=True):
                    part.load_state_dict(state)
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        replica.close()
        return weights(model)

    through = loopback(lambda rank: body(rank, False), 2)
    for one, other in zip(through, loopback(lambda rank: body(rank, True), 2), strict=True):
        assert torch.equal(one, other)


def test_without_delay_exact_weights_and_their_model_are_equal_after_an_exchange() -> None:
    """Weights that an optimizer keeps in more bits are what is averaged, and the model follows in the same step."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(4, 4).bfloat16()
        optimizer = MasterWeights(torch.optim.SGD, model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, LocalSGD(every=2, delay=0))
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.full((1, 4), rank + 1.0, dtype=torch.bfloat16)).sum().backward()
            optimizer.step()
        replica.close()
        return weights(model)

    first, second = loopback(body, 2)
    assert torch.equal(first, second)


class Normed(nn.Module):
    """Statistics of what each worker sees; weights that do not matter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(SIZE, dtype=torch.float64)

    def forward(self, step: int, rank: int) -> Tensor:
        return self.norm(noise(1, 4 * SIZE, torch.float64, seed=10 * step + rank)[0].view(4, SIZE) + rank).square().mean()

    def statistics(self) -> Tensor:
        return torch.cat([self.norm.running_mean, self.norm.running_var])  # type: ignore[list-item]


EVERYONE = Gossip(wire="fp32", topology=Complete())


@pytest.mark.parametrize("delay", [0, 1, 3])
@pytest.mark.parametrize("averaging", [AllReduce(), FOUR_BITS, EVERYONE], ids=repr)
def test_buffers_become_their_mean_at_the_times_of_the_weights(averaging: Algorithm, delay: int) -> None:
    """As in one loop where nothing travels. A running variance that an outer momentum carries on could be negative."""

    def body(rank: int) -> Tensor:
        model, seen = Normed(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=4, delay=delay, averaging=averaging))
        for step in range(1, STEPS):
            model(step, rank).backward()
            optimizer.step()
            seen.append(model.statistics())
        replica.close()
        return torch.stack(seen)

    models, due, expected = [Normed() for _ in range(WORLD)], 0, []
    for step in range(1, STEPS):
        for rank, model in enumerate(models):
            model(step, rank)
        own = torch.stack([model.statistics() for model in models])
        if step % 4 == 0:
            due, change = step + delay, own.mean(0) - own
        if step == due:
            own += change
            for model, there in zip(models, own, strict=True):
                model.norm.running_mean, model.norm.running_var = there.clone().chunk(2)
        expected.append(own)
    found = torch.stack(loopback(body, WORLD), 1)
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-12)


def test_buffers_of_a_worker_that_is_left_out_are_left_out() -> None:
    """Its weights are no numbers, and so are the statistics of what it computes."""

    def body(rank: int) -> Tensor:
        model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=3, outlier=5.0))
        for step in range(7):
            if step == 4 and rank == 1:
                with torch.no_grad():
                    model[0].weight.fill_(torch.nan)
            optimizer.zero_grad()
            model(noise(1, 4 * SIZE, seed=10 * step + rank)[0].view(4, SIZE)).square().mean().backward()
            optimizer.step()
        replica.close()
        return torch.cat([tensor.flatten() for tensor in model.state_dict().values()])

    found = torch.stack(loopback(body, WORLD))
    assert found[[0, 2, 3]].isfinite().all()
    assert not found[1].isfinite().all()


@pytest.mark.parametrize("averaging", [AllReduce(), FOUR_BITS, PowerSGD(rank=1), PowerSGD(rank=1, residual="fp32")], ids=repr)
@pytest.mark.parametrize("broken", ["nan", "inf"])
def test_what_is_not_finite_is_seen_by_all_and_remembered_by_none(averaging: Algorithm, broken: str) -> None:
    good, bad = ([tensor.view(9, 7) for tensor in noise(WORLD, 63, seed=seed)] for seed in (1, 2))
    bad[1][3, 2] = float(broken)
    for inputs in ([good, bad, good, good], [good, good, bad, good], [bad, good, good, good]):
        for outcome in exchange(DiLoCo(averaging=averaging), inputs):
            seen = [not result.isfinite().all() for result in outcome.results]
            assert seen == [mine is bad for mine in inputs]
            assert all(outcome.state[key].isfinite().all() for key in outcome.state)
            assert outcome.state[START].isfinite().all()
            assert outcome.state[VELOCITY].isfinite().all()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: LocalSGD(delay=-1), r"delay must be one of 1 .* and 0 .*got -1"),
        (lambda: LocalSGD(merge=1.0), "merge must be the share .*got 1.0"),
        (lambda: DiLoCo(delay=False), r"delay must be one of 1 .* and 0 .*got False"),
        (lambda: by_size(100, small=LocalSGD(delay=0), large=Gossip()), "added at one time.*delay="),
        (lambda: LocalSGD(every=0), "every must be a number of steps, at least 1"),
        (lambda: DiLoCo(every=1.5), "every must be a number of steps"),
        (lambda: DiLoCo(rate=0), "rate, of the outer optimizer, must be a number above 0"),
        (lambda: DiLoCo(rate="0.7"), "rate, of the outer optimizer, must be a number above 0"),
        (lambda: DiLoCo(momentum=1.0), "must be from 0 to below 1"),
        (lambda: DiLoCo(momentum=-0.1), "must be from 0 to below 1"),
        (lambda: DiLoCo(averaging=ScatterReduce), "must be an instance of a gossamer algorithm"),
        (lambda: DiLoCo(averaging=PushSum()), "keeps the mean of what it exchanges"),
        (lambda: DiLoCo(averaging=GossipGraD()), "keeps the mean of what it exchanges"),
        (lambda: DiLoCo(averaging=LocalSGD()), "has an every="),
        (lambda: DiLoCo(averaging=Gossip(lag=1)), "has an every=, delay=, merge=, lag="),
        (lambda: DiLoCo(averaging=LocalSGD(every=1, delay=5)), "has an every=, delay=, merge=, lag="),
        (lambda: DiLoCo(averaging=LocalSGD(every=1, merge=0.9)), "has an every=, delay=, merge=, lag="),
        (lambda: streaming_diloco(lag=8), "in_parts.*lag"),
        (lambda: in_parts(2, sparta(DiLoCo())), "after several periods"),
        (lambda: DiLoCo(averaging=ChunkSparse()), "averages one bucket by itself"),
        (lambda: DiLoCo(averaging=after(3, PowerSGD())), "averages one bucket by itself"),
        (lambda: after(4, DiLoCo(), before=GossipGraD()), "what an optimizer remembers must not be moved"),
        (lambda: by_size(100, small=GossipGraD(), large=DiLoCo()), "what an optimizer remembers must not be moved"),
    ],
)
def test_bad_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
