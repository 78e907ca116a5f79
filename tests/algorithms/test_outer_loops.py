"""Outer loops: overlap of several steps, fragments, merging and what a resumed run goes on with."""

import re
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    DESLOC,
    AllReduce,
    DiLoCo,
    EagerDiLoCo,
    Gossip,
    Hierarchical,
    LocalSGD,
    LowPrecisionDecentralized,
    QuantizedGossip,
    ScatterReduce,
    SparseLoCo,
    after,
    in_parts,
    loopback,
    sparta,
    streaming_diloco,
)
from gossamer.algorithms import Algorithm
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.codecs import Cast, ErrorFeedback, Quantize, TopPerChunk
from gossamer.comm.topology import Complete, Hypercube, OnePeerExponential, Ring, Topology
from gossamer.errors import ConfigurationError

from ..contracts.cases import exchange, noise, weights
from ..contracts.traces import trace
from . import resuming

WORLD, STEPS, SIZE, PERIOD = 3, 31, 12, 8


class Pull(nn.Module):
    """Each worker's loss pulls the weights to a place of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, pull: float) -> Tensor:
        return ((self.weight - torch.arange(SIZE) * (1.0 + pull)) ** 2).sum()


def inner(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.5)


def trained(algorithm: Algorithm, world: int = WORLD, resume_at: int | None = None, steps: int = STEPS) -> Tensor:
    """The weights after each step, rank by rank: ``(world, steps + 1, size)``; saved and loaded again before one step."""
    return resuming.trained(algorithm, world, steps, Pull, inner, lambda model, _, rank, step: model(rank), resume_at)


def reference(fragments: list[list[int]], spacing: int, delay: int, merge: float | None, outer: Any) -> Tensor:
    """Streaming DiLoCo in one loop where nothing travels; ``fragments``: the elements of each, exchanged ``spacing`` steps
    apart and added just before an update. ``outer``: makes torch's optimizer of a fragment's outer weights."""
    models = [Pull() for _ in range(WORLD)]
    optimizers = [inner(model) for model in models]
    starts = [nn.Parameter(models[0].weight.detach()[f].clone()) for f in fragments]
    outers = [outer(start) for start in starts]
    pending: list[tuple[int, int, Tensor, Tensor]] = []
    seen = []

    def add(until: int) -> None:
        for due in [each for each in pending if each[0] <= until]:
            pending.remove(due)
            for model, sent in zip(models, due[3], strict=True):
                now = model.weight.data[fragments[due[1]]]
                merged = now + due[2] - sent if merge is None else merge * now + (1 - merge) * due[2]
                model.weight.data[fragments[due[1]]] = merged

    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            model(rank).backward()
        add(step)
        for optimizer in optimizers:
            optimizer.step()
        period = spacing * len(fragments)
        for number, places in enumerate(fragments):
            if (step - number * spacing) % period == 0:
                sent = torch.stack([model.weight.detach()[places] for model in models])
                starts[number].grad = starts[number].detach() - sent.mean(0)
                outers[number].step()
                pending.append((step + delay, number, starts[number].detach().clone(), sent))
        add(step)
        seen.append(torch.stack([model.weight.detach().clone() for model in models]))
    return torch.stack(seen, 1)


def nesterov(start: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([start], lr=0.7, momentum=0.9, nesterov=True)


@pytest.mark.parametrize("merge", [None, 0.0, 0.5])
@pytest.mark.parametrize("delay", [0, 1, 2, 5, 8])
@pytest.mark.parametrize(("count", "strides"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_streaming_is_the_loop_in_one_process(count: int, strides: int, delay: int, merge: float | None) -> None:
    """With four fragments and a delay of more than two steps several are under way together."""
    cuts = [SIZE * piece // (count * strides) for piece in range(count * strides + 1)]
    pieces = [range(*ends) for ends in pairwise(cuts)]
    fragments = [[place for piece in pieces[number::count] for place in piece] for number in range(count)]
    expected = reference(fragments, PERIOD // count, delay, merge, nesterov)
    algorithm = streaming_diloco(dense=0, every=PERIOD, fragments=count, delay=delay, merge=merge, strides=strides)
    torch.testing.assert_close(trained(algorithm)[:, :-1], expected, rtol=0, atol=1e-12)


def test_one_fragment_without_delay_is_diloco() -> None:
    plain, streaming = (
        trained(algorithm)
        for algorithm in (
            DiLoCo(dense=0, every=PERIOD, delay=0),
            streaming_diloco(dense=0, every=PERIOD, fragments=1, delay=0, merge=0.0),
        )
    )
    torch.testing.assert_close(streaming, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("every", [2, 5])
def test_eager_diloco_takes_its_own_new_delta_and_the_old_ones_of_others(every: int) -> None:
    """As in one loop where nothing travels, with torch's SGD as each worker's outer optimizer."""
    models = [Pull() for _ in range(WORLD)]
    optimizers = [inner(model) for model in models]
    starts = [nn.Parameter(model.weight.detach().clone()) for model in models]
    outers = [nesterov(start) for start in starts]
    before = torch.zeros(WORLD, SIZE, dtype=torch.float64)
    seen = []
    for step in range(1, STEPS + 1):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            model(rank).backward()
            optimizers[rank].step()
        if step % every == 0:
            deltas = torch.stack([start.detach() - model.weight.detach() for start, model in zip(starts, models, strict=True)])
            for rank, start in enumerate(starts):
                start.grad = deltas[rank] / WORLD + (before.mean(0) - before[rank] / WORLD)
                outers[rank].step()
                models[rank].weight.data.copy_(start.detach())
            before = deltas
        seen.append(torch.stack([model.weight.detach().clone() for model in models]))
    found = trained(EagerDiLoCo(dense=0, every=every))[:, :-1]
    torch.testing.assert_close(found, torch.stack(seen, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "algorithm",
    [
        EagerDiLoCo(dense=0, every=5),
        streaming_diloco(dense=0, every=PERIOD, fragments=4, delay=3),
        streaming_diloco(dense=0, every=PERIOD, fragments=2, delay=7, merge=None, strides=2),
        LocalSGD(dense=0, every=5, delay=4),
        after(6, DiLoCo(dense=0, every=5, delay=3, merge=0.25)),
        SparseLoCo(dense=0, every=5, delay=3),
        SparseLoCo(dense=0, every=5, delay=3, keep_unsent=False),
        DiLoCo(dense=0, every=5, delay=3, averaging=Gossip(topology=Ring())),
        DiLoCo(dense=0, every=5, delay=3, averaging=LowPrecisionDecentralized(codec=TopPerChunk(density=0.3, chunk=8))),
        DiLoCo(dense=0, every=5, delay=3, averaging=ScatterReduce(codec=Quantize(bits=2), decay=0.9)),
        DiLoCo(dense=0, every=5, delay=3, outlier=0.5),
        DiLoCo(dense=0, every=5, lag=3),
        DESLOC(dense=0, every=3, first=4, second=5),
        sparta(DiLoCo(dense=0, every=5), share=0.3),
    ],
    ids=repr,
)
def test_a_run_resumed_anywhere_is_the_run(algorithm: Algorithm) -> None:
    """In the middle of a period, of a fragment's turn and of exchanges under way: the same bits."""
    steps = 13
    through = trained(algorithm, steps=steps)
    for resume_at in range(1, steps):
        assert torch.equal(trained(algorithm, WORLD, resume_at, steps=steps), through), resume_at


@pytest.mark.parametrize("delay", [1, 3, 5])
def test_the_mean_of_workers_that_keep_what_they_learn_is_kept(delay: int) -> None:
    """However long the exchange takes, the mean moves by the mean update: as without any exchange, for a loss of this form."""
    together, alone = trained(LocalSGD(dense=0, every=5, delay=delay)), trained(LocalSGD(dense=0, every=1000))
    torch.testing.assert_close(together[:, -2].mean(0), alone[:, -2].mean(0), rtol=0, atol=1e-12)
    assert (together[0, -2] - together[1, -2]).abs().max() < (alone[0, -2] - alone[1, -2]).abs().max()


def test_what_is_under_way_at_a_change_is_added_before_others_are_sent() -> None:
    changed = trained(after(9, Gossip(wire="fp32"), before=LocalSGD(dense=0, every=8, delay=6)))
    kept = trained(LocalSGD(dense=0, every=1000))
    torch.testing.assert_close(changed[:, -1].mean(0), kept[:, -1].mean(0), rtol=0, atol=1e-12)


def test_what_is_under_way_when_a_replica_closes_is_added() -> None:
    last = trained(LocalSGD(dense=0, every=30, delay=20))
    assert (last[:, -2] - last[0, -2]).abs().max() > 0.1
    own = last[:, -2] - trained(LocalSGD(dense=0, every=30, delay=20), steps=30)[:, -2]  # the update after what was sent
    torch.testing.assert_close(last[:, -1] - own, (last[:, -1] - own).mean(0).expand(WORLD, -1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("nesterov", [True, False])
def test_gossip_among_all_is_diloco(nesterov: bool) -> None:
    """With peers that are all workers, and full precision on the wire."""
    everyone = Gossip(wire="fp32", topology=Complete())
    gossiped, plain = (
        trained(DiLoCo(dense=0, every=4, nesterov=nesterov, averaging=averaging), 4) for averaging in (everyone, AllReduce())
    )
    torch.testing.assert_close(gossiped, plain, rtol=0, atol=1e-11)


SPARSE = LowPrecisionDecentralized(codec=TopPerChunk(density=0.25, chunk=8))
"""Gossip of which each message is the largest quarter of what a neighbour does not know yet, in two bits and a place."""


@pytest.mark.parametrize("averaging", [Gossip(), Gossip(topology=Ring()), QuantizedGossip(), SPARSE], ids=repr)
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_gossip_with_an_outer_optimizer_moves_the_mean_by_the_mean_outer_step(world: int, averaging: Algorithm) -> None:
    """Whatever is on the wire and whoever meets: the mean of all workers goes as if all had averaged exactly."""
    gossiped, plain = (trained(DiLoCo(dense=0, every=4, averaging=each), world).mean(0) for each in (averaging, AllReduce()))
    torch.testing.assert_close(gossiped, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("world", "exchanges"), [(2, 1), (4, 2), (8, 3)])
def test_what_workers_learned_in_one_period_is_shared_after_a_cycle_of_peers(world: int, exchanges: int) -> None:
    """Also what the outer momentum remembers of it: no worker goes on by a velocity of its own."""

    def plain(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.03)

    def first_period(model: nn.Module, _: gossamer.Replica, rank: int, step: int) -> Tensor:
        return model(rank) * (1.0 if step < 4 else 0.0)

    gossip = DiLoCo(dense=0, every=4, delay=0, averaging=Gossip(topology=OnePeerExponential(), wire="fp32"))
    seen = resuming.trained(gossip, world, 4 * (exchanges + 2), Pull, plain, first_period)
    spread = (seen - seen.mean(0)).abs().amax(dim=(0, 2))
    assert spread[4 * exchanges - 2] > 0.1
    assert spread[4 * exchanges - 1 :].max() < 1e-12
    assert (seen[:, -1] - seen[:, 4 * exchanges - 1]).abs().max() > 0.1, "the momentum moves all of them on"


def test_gossip_with_an_outer_optimizer_has_no_collective() -> None:
    """And peers change from one outer step to the next, also where the steps between two are a multiple of the cycle."""
    (steps, _), _ = trace(DiLoCo(dense=0, every=4, averaging=Gossip(topology=OnePeerExponential())), 4)
    said = [step for step in steps if "bytes" in step and not step.startswith("0 bytes")]
    assert len(said) == 2
    assert said[0] != said[1]
    assert all(set(re.findall(r"\d ([a-z_]+)\(", step)) == {"permute"} for step in said)


@pytest.mark.parametrize("decay", [1.0, 0.95, 0.5, 0.0])
@pytest.mark.parametrize(
    "make",
    [
        partial(Gathered, codec=TopPerChunk(density=0.2, chunk=32), residual="fp32"),
        partial(ScatterReduce, codec=Quantize(bits=2), residual="fp32", gather_below=0),
    ],
    ids=["gathered", "scatter-reduce"],
)
def test_what_is_sent_and_kept_is_what_was_kept_times_the_decay_and_the_delta(
    make: Callable[..., Algorithm], decay: float
) -> None:
    steps = [noise(WORLD, 100, torch.float64, seed=step) for step in range(5)]
    kept_before = torch.zeros(100, dtype=torch.float64)
    for step in range(5):
        outcomes = exchange(make(decay=decay), steps[: step + 1])
        kept = torch.stack([outcome.state["residual"] for outcome in outcomes]).sum(0)
        had = decay * kept_before + torch.stack(steps[step]).sum(0)
        torch.testing.assert_close(WORLD * outcomes[0].results[-1] + kept, had, rtol=0, atol=1e-12)
        kept_before = kept


def test_a_message_counts_with_the_length_of_the_median_at_most() -> None:
    tensors = noise(5, 200, torch.float64)
    tensors[3] *= 1000
    lengths = sorted(float(torch.linalg.vector_norm(tensor)) for tensor in tensors)
    scaled = [tensor * min(1.0, lengths[2] / float(torch.linalg.vector_norm(tensor))) for tensor in tensors]
    found = exchange(Gathered(codec=Cast(), clip=True), [tensors])[0].results[0]
    torch.testing.assert_close(found, torch.stack(scaled).mean(0), rtol=0, atol=1e-12)


def test_what_loses_nothing_makes_diloco_of_sparse_loco() -> None:
    sparse, plain = (
        trained(algorithm)
        for algorithm in (
            SparseLoCo(dense=0, every=4, rate=1.0, momentum=0.0, averaging=Gathered(codec=Cast())),
            DiLoCo(dense=0, every=4, rate=1.0, momentum=0.0),
        )
    )
    torch.testing.assert_close(sparse, plain, rtol=0, atol=1e-12)


@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_what_is_not_sent_stays_in_the_weights_and_the_mean_is_kept(world: int) -> None:
    """At rate 1 and without momentum, whatever is left out: the mean of all workers goes as if all had averaged exactly."""
    codec = TopPerChunk(density=0.2, chunk=6)
    sparse = SparseLoCo(
        dense=0, every=4, rate=1.0, momentum=0.0, nesterov=False, averaging=Gathered(codec=codec, residual="fp32")
    )
    found, plain = (trained(each, world) for each in (sparse, LocalSGD(dense=0, every=4)))
    torch.testing.assert_close(found.mean(0), plain.mean(0), rtol=0, atol=1e-9)
    assert (found - found.mean(0))[:, 6].abs().max() > 1e-3, "workers differ by what they have not sent"


def test_what_is_not_sent_is_added_to_the_next_delta_instead() -> None:
    """As in the paper: all workers begin again at the same weights, and the residual is kept beside them."""
    codec = TopPerChunk(density=0.2, chunk=6)
    published = SparseLoCo(
        dense=0, every=4, delay=0, rate=1.0, momentum=0.0, nesterov=False, keep_unsent=False,
        averaging=Gathered(codec=codec, decay=0.95, residual="fp32"),
    )  # fmt: skip
    found = trained(published)
    models, residuals = [Pull() for _ in range(WORLD)], torch.zeros(WORLD, SIZE, dtype=torch.float64)
    optimizers, start = [inner(model) for model in models], torch.zeros(SIZE, dtype=torch.float64)
    for step in range(1, STEPS + 1):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        if step % 4 == 0:
            had = 0.95 * residuals + start - torch.stack([model.weight.detach() for model in models])
            sent = torch.stack([codec.decode(codec.encode(each), SIZE, torch.float64) for each in had])
            residuals, start = had - sent, start - sent.mean(0)
            for model in models:
                model.weight.data.copy_(start)
        now = torch.stack([model.weight.detach() for model in models])
        torch.testing.assert_close(found[:, step - 1], now, rtol=0, atol=1e-9)


def bytes_between(algorithm: Algorithm, first: int, last: int, world: int = 4) -> float:
    """What a rank sends from one step to another."""

    def body(rank: int) -> float:
        model = nn.Linear(256, 256)
        optimizer = inner(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        sent = {}
        for step in range(1, last + 1):
            optimizer.zero_grad()
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            replica.wait_for_exchanges()
            sent[step] = replica.metrics()["bytes_sent"]
        replica.close()
        return sent[last] - sent[first]

    return loopback(body, world)[0]


def test_sparse_loco_sends_a_hundred_and_fortieth_of_an_all_reduce_of_every_step() -> None:
    """In each of its periods, among eight workers; among four half of that, and with the sixty-fourth of the elements that the
    paper sends, less than a two-thousandth."""
    eight = [bytes_between(algorithm, 31, 61, world=8) for algorithm in (SparseLoCo(dense=0), AllReduce())]
    assert 0 < eight[0] < eight[1] / 140
    dense, usual = bytes_between(AllReduce(), 31, 61), bytes_between(SparseLoCo(dense=0), 31, 61)
    sparse = bytes_between(SparseLoCo(dense=0, averaging=Gathered(decay=0.95, clip=True)), 31, 61)
    assert 0 < sparse < usual < dense / 280
    assert sparse < dense / 2000


def test_moments_become_their_means_after_periods_of_their_own() -> None:
    """As in one loop where nothing travels."""

    def make() -> tuple[Pull, torch.optim.Optimizer]:
        model = Pull()
        return model, torch.optim.Adam(model.parameters(), lr=0.1, eps=1e-3)

    def body(rank: int) -> Tensor:
        model, optimizer = make()
        replica = gossamer.replicate(model, optimizer, DESLOC(dense=0, every=2, first=2, second=3, delay=0))
        seen = []
        for _ in range(25):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
            seen.append(model.weight.detach().clone())
        replica.close()
        return torch.stack(seen)

    workers, expected = [make() for _ in range(WORLD)], []
    for step in range(1, 26):
        for rank, (model, optimizer) in enumerate(workers):
            optimizer.zero_grad()
            model(rank).backward()
            optimizer.step()
        states = [optimizer.state[model.weight] for model, optimizer in workers]
        for period, tensors in (
            (2, [model.weight.data for model, _ in workers]),
            (4, [state["exp_avg"] for state in states]),
            (6, [state["exp_avg_sq"] for state in states]),
        ):
            mean = torch.stack(tensors).mean(0)
            if step % period == 0:
                for tensor in tensors:
                    tensor.copy_(mean)
        expected.append(torch.stack([model.weight.detach().clone() for model, _ in workers]))
    found = torch.stack(loopback(body, WORLD))
    torch.testing.assert_close(found, torch.stack(expected, 1), rtol=0, atol=1e-12)


@pytest.mark.parametrize("topology", [None, Ring()], ids=repr)
def test_a_few_weights_in_every_step_keep_the_mean_and_replicas_closer(topology: Topology | None) -> None:
    alone, seldom = trained(LocalSGD(dense=0, every=1000)), trained(LocalSGD(dense=0, every=12))
    often = trained(sparta(LocalSGD(dense=0, every=12), share=0.2, topology=topology))
    torch.testing.assert_close(often.mean(0), alone.mean(0), rtol=0, atol=1e-12)
    assert often[:, :-1].std(0).mean() < 0.9 * seldom[:, :-1].std(0).mean()


def test_a_few_weights_in_every_step_cost_their_share() -> None:
    """Moments, which :class:`DESLOC` averages now and then, are not among them."""
    few, with_moments, none = (
        bytes_between(algorithm, 31, 41)
        for algorithm in (
            sparta(LocalSGD(dense=0, every=30), share=0.005),
            sparta(DESLOC(dense=0, every=30), share=0.005),
            SparseLoCo(dense=0),
        )
    )
    assert none == 0
    assert 0 < few < 1.1 * 0.005 * bytes_between(AllReduce(), 31, 41) + 10 * 64 * 4
    assert with_moments == few


@pytest.mark.parametrize("bits", [8, 4, 2])
def test_muon_and_adamw_with_an_outer_optimizer(bits: Literal[8, 4, 2]) -> None:
    """Each has an exchange of its own; outer deltas travel in a few bits, and all go on from the same weights."""

    def body(rank: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(16, 16)
        optimizers = [torch.optim.Muon([model.weight], lr=0.02), torch.optim.AdamW([model.bias], lr=0.02)]
        averaging = ScatterReduce(codec=Quantize(bits=bits), decay=0.9, gather_below=0)
        replica = gossamer.replicate(model, optimizers, DiLoCo(dense=0, every=3, delay=0, averaging=averaging))
        start = weights(model)
        for step in range(12):
            for optimizer in optimizers:
                optimizer.zero_grad()
            model(noise(1, 64, seed=10 * step + rank)[0].view(4, 16)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
        replica.close()
        return weights(model) - start

    moved = torch.stack(loopback(body, 4))
    assert (moved - moved[0]).abs().max() < 1e-6
    assert moved.abs().min() > 0


def test_a_dense_start_averages_gradients_first() -> None:
    """As ``after`` does; ten times the steps alone where these are many, and also in parts and between nodes."""
    dense, after_it = (trained(algorithm) for algorithm in (DiLoCo(every=6, dense=5), after(5, DiLoCo(every=6, dense=0))))
    assert torch.equal(dense, after_it)
    assert torch.equal(dense[0, 4], dense[1, 4])
    assert not torch.equal(dense[0, 5], dense[1, 5])
    assert DiLoCo(every=30).traits.dense == LocalSGD(every=30).traits.dense == SparseLoCo().traits.dense == 300
    assert DESLOC(every=8).traits.dense == 80
    assert LocalSGD(every=7).traits.dense == 0
    assert streaming_diloco(every=32).traits.dense == 320
    assert Hierarchical(DiLoCo(every=30), ranks_per_node=2).traits.dense == 300
    assert after(9, DiLoCo(every=30)).traits.dense == 0


def peak_and_total(algorithm: Algorithm) -> tuple[float, float]:
    """The most bytes per step that a rank must send to keep what its exchanges promise, and the bytes of three periods."""

    def body(rank: int) -> list[float]:
        model = nn.Linear(64, 64)
        optimizer = inner(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        seen = [0.0]
        for _ in range(97):
            optimizer.zero_grad()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            seen.append(replica.metrics()["bytes_sent"])
        replica.wait_for_exchanges()
        replica.close()
        return [after - before for before, after in pairwise(seen)]

    sent = loopback(body, 4)[0][1:]
    delay = max(1, *algorithm.cadence.delays)
    windows = [sum(sent[first : first + delay]) for first in range(len(sent) - delay + 1)]
    return max(windows) / delay, sum(sent)


def test_streaming_needs_a_tenth_of_the_rate_of_diloco() -> None:
    whole, streaming = DiLoCo(dense=0, every=32), streaming_diloco(dense=0, every=32, fragments=4, delay=4)
    (plain, all_of_it), (spread, as_much) = peak_and_total(whole), peak_and_total(streaming)
    assert spread <= plain / 10
    assert as_much == pytest.approx(all_of_it, rel=0.3), "fragments are exchanged as often, in other steps"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: streaming_diloco(dense=0, every=0), "every must be a whole number, at least 1"),
        (lambda: streaming_diloco(dense=0, fragments=0), "fragments must be a whole number, at least 1"),
        (lambda: streaming_diloco(dense=0, every=10, fragments=4), "cannot be spread evenly"),
        (lambda: streaming_diloco(dense=0, every=8, fragments=4, delay=9), "more than the every=8"),
        (lambda: streaming_diloco(dense=0, merge=1.0), "merge must be the share"),
        (lambda: EagerDiLoCo(every=1), "a period of at least 2 steps"),
        (lambda: in_parts(2, EagerDiLoCo()), "at two steps of a period"),
        (lambda: EagerDiLoCo(delay=3), "neither delay nor merge"),
        (lambda: EagerDiLoCo(averaging=Gossip()), "averages over all workers"),
        (lambda: DiLoCo(dense=-1), "dense must be a number of steps"),
        (lambda: TopPerChunk(chunk=5000), "chunk must be a number of elements from 1 to 4096"),
        (lambda: Gathered(decay=1.5), "decay must be the share of the residual"),
        (lambda: ScatterReduce(decay=-0.1), "decay must be the share of the residual"),
        (lambda: ErrorFeedback(decay="0.9"), "decay must be the share of the residual"),
        (lambda: sparta(AllReduce()), "takes an algorithm over weights"),
        (lambda: sparta(DiLoCo(dense=0), share=0), "share must be above 0"),
        (lambda: sparta(DiLoCo(dense=0), topology="ring"), "topology must be None, or one such as Ring"),  # type: ignore[arg-type]
        (lambda: sparta(after(3, DiLoCo(dense=0))), "is put inside of what averages gradients"),
        (lambda: sparta(Hierarchical(DiLoCo(dense=0))), "is put inside of what averages gradients"),
        (lambda: DiLoCo(rate=float("inf")), "must be a number above 0, and finite"),
        (lambda: DiLoCo(nesterov="yes"), "nesterov, of the outer optimizer, must be True or False"),  # type: ignore[arg-type]
        (lambda: SparseLoCo(keep_unsent=1), "keep_unsent must be True or False"),  # type: ignore[arg-type]
        (lambda: sparta(streaming_diloco(dense=0)), "under way for longer, or in parts"),
        (lambda: trained(sparta(LocalSGD(dense=0), topology=Hypercube())), "3 ranks are not a power of two"),
        (lambda: trained(after(50, LocalSGD(dense=0), before=DiLoCo(every=8))), "nothing is left of DiLoCo.* 80 dense steps"),
        (lambda: DESLOC(dense=0, first=0), "first must be a number of steps, at least 1"),
        (lambda: in_parts(2, Gossip(), strides=0), "strides must be a number"),
        (lambda: trained(LocalSGD(dense=0, every=4, delay=5)), "added after 5 steps .* exchanged every 4 steps"),
        (lambda: trained(in_parts(2, DiLoCo(dense=0, every=4, delay=9))), "added after 9 steps .* exchanged every 8 steps"),
        (lambda: trained(streaming_diloco(dense=0, every=32, fragments=16)), "part 0 of 16 of 12 weights .* would be empty"),
    ],
)
def test_bad_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()
