"""Uneven workers: batches of different sizes, workers of different speed, and workers that are out of line."""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

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
from gossamer.codecs import Cast, TopPerChunk
from gossamer.errors import ConfigurationError, UsageError
from gossamer.optim import OneBitAdam
from gossamer.simulate import Compute, Link, step_time

from ..contracts.cases import noise, weights
from . import resuming

STEPS, WIDTH = 7, 5


def size(rank: int, step: int) -> int:
    """How many samples a rank's batch has: other shares in every step, for some ranks none in some steps."""
    return (3 * rank + 2 * step) % 5 + (rank == 0)


def batch(rank: int, step: int) -> Tensor:
    return noise(1, size(rank, step) * WIDTH, torch.float64, seed=100 * rank + step)[0].view(-1, WIDTH)


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss(model: nn.Module, inputs: Tensor) -> Tensor:
    """The mean over a batch; of none, nothing."""
    return (model(inputs) - inputs.sum(1, keepdim=True)).square().sum() / max(1, len(inputs))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def trained(
    algorithm: Algorithm, world: int, make: Callable[..., Any] = sgd, weighed: bool = True, resume_at: int | None = None
) -> Tensor:
    """The weights after each step, rank by rank."""

    def loss_of(model: nn.Module, replica: gossamer.Replica, rank: int, step: int) -> Tensor:
        if weighed:
            replica.weigh(size(rank, step))
        return loss(model, batch(rank, step))

    return resuming.trained(algorithm, world, STEPS, model_of, make, loss_of, resume_at)


def of_one_large_batch(world: int, make: Callable[..., Any] = sgd) -> Tensor:
    model = model_of()
    optimizer = make(model)
    seen = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.cat([batch(rank, step) for rank in range(world)])).backward()
        optimizer.step()
        seen.append(weights(model))
    return torch.stack(seen)


EXACT = [
    AllReduce(),
    AllReduce(gather_below=0, bucket_bytes=64),
    ScatterReduce(codec=Cast(), exact_vectors=False, gather_below=0, residual="fp32"),
    Hierarchical(ranks_per_node=2),
    Hierarchical(inner=AllReduce(), ranks_per_node=3),
    LocalSGD(every=1, delay=0),
]


@pytest.mark.parametrize("world", [2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", EXACT[:2] + EXACT[3:], ids=repr)
def test_uneven_batches_are_one_large_batch(algorithm: Algorithm, world: int) -> None:
    expected = of_one_large_batch(world).expand(world, -1, -1)
    if algorithm.subject == "gradients":
        torch.testing.assert_close(trained(algorithm, world)[:, :-1], expected, rtol=0, atol=1e-9)
    else:
        plain = partial(torch.optim.SGD, lr=0.05)
        make = lambda model: plain(model.parameters())  # noqa: E731
        found, expected = trained(algorithm, world, make)[:, :-1], of_one_large_batch(world, make).expand(world, -1, -1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [sgd, adam])
def test_without_weighing_uneven_batches_are_something_else(make: Callable[..., Any]) -> None:
    """So that the test above can fail; and with it any optimizer has the gradient of the large batch."""
    expected = of_one_large_batch(3, make).expand(3, -1, -1)
    torch.testing.assert_close(trained(AllReduce(), 3, make)[:, :-1], expected, rtol=0, atol=1e-7)
    assert (trained(AllReduce(), 3, make, weighed=False)[:, :-1] - expected).abs().max() > 1e-3


def test_what_a_codec_keeps_is_kept_by_samples() -> None:
    """With error feedback nothing of the mean by samples is lost: the sum of what was sent and is kept is what was had."""

    def body(rank: int) -> tuple[Tensor, Tensor]:
        model = model_of()
        replica = gossamer.replicate(model, sgd(model), ScatterReduce(exact_vectors=False, gather_below=0, residual="fp32"))
        total = torch.zeros_like(weights(model))
        for step in range(STEPS):
            replica.weigh(size(rank, step))
            model.zero_grad()
            loss(model, batch(rank, step)).backward()
            total += torch.cat([p.grad.flatten() for p in model.parameters()])
            torch.optim.SGD(model.parameters(), lr=0.0).step()
        kept = replica.state_dict()
        residual = kept[next(key for key in kept if "rank" in key)][0]["residual"]
        return total, torch.cat([residual[name].flatten() for name, _ in model.named_parameters()])

    totals, kept = map(torch.stack, zip(*loopback(body, 3), strict=True))
    model, expected = model_of(), torch.zeros_like(totals[0])
    for step in range(STEPS):
        model.zero_grad()
        loss(model, torch.cat([batch(rank, step) for rank in range(3)])).backward()
        expected += torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (totals[0] - expected).abs().max() > 1e-6
    torch.testing.assert_close(totals[0] + kept.sum(0) / 3, expected, rtol=0, atol=1e-9)


def test_samples_of_several_passes_add_up() -> None:
    """Of a step that accumulates: the losses are divided by the samples of all its passes."""

    def body(rank: int) -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer)
        for step in range(0, STEPS - 1, 2):
            samples = size(rank, step) + size(rank, step + 1)
            optimizer.zero_grad()
            for part in (step, step + 1):
                replica.weigh(size(rank, part))
                mean = loss(model, batch(rank, part)) * size(rank, part) / max(1, samples)
                if part == step:
                    with replica.no_sync():
                        mean.backward()
                else:
                    mean.backward()
            optimizer.step()
        replica.close()
        return weights(model)

    model = model_of()
    optimizer = sgd(model)
    for step in range(0, STEPS - 1, 2):
        optimizer.zero_grad()
        loss(model, torch.cat([batch(rank, part) for rank in range(3) for part in (step, step + 1)])).backward()
        optimizer.step()
    for found in loopback(body, 3):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-9)


def test_ranks_whose_batches_have_ended_count_with_none() -> None:
    """Inside join(), the mean is that of the samples that there are, and not divided by the world."""

    def body(rank: int) -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer)
        replica.weigh(0)
        with replica.join():
            for step in range(STEPS - 2 * rank):
                replica.weigh(size(rank, step))
                optimizer.zero_grad()
                loss(model, batch(rank, step)).backward()
                optimizer.step()
        replica.close()
        return weights(model)

    model = model_of()
    optimizer = sgd(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss(model, torch.cat([batch(rank, step) for rank in range(3) if step < STEPS - 2 * rank])).backward()
        optimizer.step()
    for found in loopback(body, 3):
        torch.testing.assert_close(found, weights(model), rtol=0, atol=1e-9)


def reference(world: int, every: int, outer: Callable[[nn.Parameter], torch.optim.Optimizer]) -> Tensor:
    """An outer loop in one process, of which each worker's delta counts by its samples of the period."""
    models = [model_of() for _ in range(world)]
    optimizers = [sgd(model) for model in models]
    start = nn.Parameter(weights(models[0]))
    stepper, seen, counts = outer(start), [], torch.zeros(world, dtype=torch.float64)
    for step in range(STEPS):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            loss(model, batch(rank, step)).backward()
            optimizers[rank].step()
            counts[rank] += size(rank, step)
        if (step + 1) % every == 0:
            shares = counts / counts.sum()
            learned = torch.stack([start.detach() - weights(model) for model in models])
            start.grad = (shares.unsqueeze(1) * learned).sum(0)
            stepper.step()
            for model in models:
                nn.utils.vector_to_parameters(start.detach().clone(), model.parameters())
            counts.zero_()
        seen.append(torch.stack([weights(model) for model in models]))
    return torch.stack(seen, 1)


def learned_by_thirds(algorithm: Algorithm, samples: Callable[[int, int], int]) -> Tensor:
    """What three workers have learned after 40 steps, of which each learns in a third of the weights, equally much per step."""

    def body(rank: int) -> Tensor:
        third = torch.zeros(3 * 64, dtype=torch.float64)
        third[64 * rank : 64 * (rank + 1)] = -1
        model = nn.Module()
        model.weight = nn.Parameter(torch.zeros_like(third))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(40):
            replica.weigh(samples(rank, step))
            optimizer.zero_grad()
            (model.weight @ third * (samples(rank, step) > 0)).backward()
            optimizer.step()
        replica.close(average=True)
        return model.weight.detach()

    return loopback(body, 3)[0].view(3, 64)


@pytest.mark.parametrize("samples", [lambda rank, step: (1, 1, 6)[rank], lambda rank, step: int(rank == 0 or step < 5)])
def test_clipping_leaves_what_is_long_for_its_samples(samples: Callable[[int, int], int]) -> None:
    mean: dict[str, Any] = {"every": 5, "dense": 0, "rate": 1.0, "momentum": 0.0, "nesterov": False}
    expected = learned_by_thirds(DiLoCo(**mean), samples)
    torch.testing.assert_close(learned_by_thirds(SparseLoCo(**mean), samples), expected, rtol=0, atol=1e-6)


def nesterov(start: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([start], lr=0.7, momentum=0.9, nesterov=True)


def plain(start: nn.Parameter) -> torch.optim.Optimizer:
    return torch.optim.SGD([start], lr=1.0)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize(
    ("algorithm", "outer"),
    [
        (LocalSGD(every=3, delay=0), plain),
        (LocalSGD(every=3, delay=0, merge=0.0, bucket_bytes=32), plain),
        (DESLOC(every=3, delay=0, first=100, second=100), plain),
        (DiLoCo(every=3, delay=0), nesterov),
        (DiLoCo(every=3, delay=0, bucket_bytes=32, averaging=ScatterReduce(codec=Cast(), gather_below=0)), nesterov),
        (streaming_diloco(every=3, fragments=1, delay=0, merge=0.0), nesterov),
    ],
    ids=lambda value: getattr(value, "__name__", repr(value)),
)
def test_outer_loops_count_by_the_samples_of_a_period(algorithm: Algorithm, outer: Callable[..., Any], world: int) -> None:
    tolerance = 1e-6 if "ScatterReduce" in repr(algorithm) else 1e-9
    torch.testing.assert_close(trained(algorithm, world)[:, :-1], reference(world, 3, outer), rtol=0, atol=tolerance)


class Slope(nn.Module):
    """A loss whose gradient does not depend on the weights: what a worker learns is the same wherever it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(noise(1, 48, torch.float64)[0])

    def forward(self, rank: int, step: int) -> Tensor:
        return self.weight @ slope(rank, step)


def slope(rank: int, step: int) -> Tensor:
    """Its gradient."""
    return noise(1, 48, torch.float64, seed=100 * rank + step + 7)[0]


def gradients(algorithm: Algorithm, samples: Callable[[int, int], int]) -> list[list[Tensor]]:
    """Of two ranks, what each has for a gradient in every pass."""

    def body(rank: int) -> list[Tensor]:
        model = Slope()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        seen = []
        for step in range(STEPS):
            replica.weigh(samples(rank, step))
            optimizer.zero_grad()
            model(rank, step).backward()
            seen.append(model.weight.grad.clone())
            optimizer.step()
        replica.close()
        return seen

    return loopback(body, 2)


@pytest.mark.parametrize("before", [AllReduce(), ScatterReduce()], ids=repr)
def test_from_the_first_local_step_on_a_gradient_is_the_worker_s_own(before: Algorithm) -> None:
    """Whatever samples it has; what the phase before has kept of gradients is less than a tenth of one."""

    algorithm = after(3, LocalSGD(every=100), before=before)
    for rank, seen in enumerate(gradients(algorithm, lambda rank, step: 1 + 2 * rank)):
        own = [slope(rank, step) for step in range(STEPS)]
        assert (seen[2] - own[2]).norm() > 0.2 * own[2].norm()
        for gradient, mine in zip(seen[3:], own[3:], strict=True):
            assert (gradient - mine).norm() < 0.1 * mine.norm()


def test_samples_of_local_passes_are_not_those_of_a_later_gradient() -> None:
    """Both workers have as many in the passes whose gradients are averaged again."""

    algorithm = after(4, AllReduce(), before=after(2, LocalSGD(every=2)))
    for seen in gradients(algorithm, lambda rank, step: 1 + 8 * rank if step < 4 else 5):
        for step in (4, 5):
            own = [slope(rank, step) for rank in range(2)]
            torch.testing.assert_close(seen[step], (own[0] + own[1]) / 2, rtol=0, atol=1e-9)


EIGHT = LocalSGD(every=8, delay=0, dense=0)


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (EIGHT, None),
        (EIGHT, EIGHT),
        (EIGHT, LocalSGD(every=4, delay=0, dense=0, bucket_bytes=64)),
        (EIGHT, DESLOC(every=4, delay=0, dense=0)),
        (EIGHT, in_parts(1, LocalSGD(every=8, delay=0, dense=0), strides=2)),
        (after(6, LocalSGD(every=4, delay=0, dense=0), before=EIGHT), None),
    ],
    ids=repr,
)
def test_samples_of_a_period_count_whatever_algorithm_ends_it(first: Algorithm, then: Algorithm | None) -> None:
    """The first rank has all of its samples before the change."""

    def body(rank: int) -> Tensor:
        model = Slope()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, first)
        for step in range(8):
            if then is not None and step == 6:
                replica.switch(then)
            replica.weigh((10 if step < 6 else 0) if rank == 0 else 1)
            optimizer.zero_grad()
            (model.weight.sum() * (1 - 2 * rank)).backward()
            optimizer.step()
        replica.close()
        return weights(model)

    expected = Slope().weight.detach() - 0.1 * 8 * (60 - 8) / 68
    for found in loopback(body, 2):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_what_uneven_workers_have_not_sent_counts_once(world: int) -> None:
    """By the samples of the period in which it was learned, and as it is from then on, whatever samples others follow."""
    averaging = Gathered(codec=TopPerChunk(density=0.2, chunk=12), residual="fp32")
    algorithm = SparseLoCo(every=2, delay=0, rate=1.0, momentum=0.0, nesterov=False, averaging=averaging)

    def body(rank: int) -> Tensor:
        model = Slope()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        replica = gossamer.replicate(model, optimizer, algorithm)
        seen = []
        for step in range(STEPS - 1):
            optimizer.zero_grad()
            replica.weigh(size(rank, step))
            model(rank, step).backward()
            optimizer.step()
            if step % 2:
                seen.append(weights(model))
        replica.close(average=False)
        return torch.stack(seen)

    found = torch.stack(loopback(body, world))
    expected, seen = Slope().weight.detach().clone(), []
    for step in range(0, STEPS - 1, 2):
        counts = torch.tensor([sum(size(rank, step + k) for k in (0, 1)) for rank in range(world)], dtype=torch.float64)
        for rank, share in enumerate(counts / counts.sum()):
            for k in (0, 1):
                expected -= 0.1 * share * noise(1, 48, torch.float64, seed=100 * rank + step + k + 7)[0]
        seen.append(expected.clone())
    torch.testing.assert_close(found.mean(0), torch.stack(seen), rtol=0, atol=1e-9)
    assert (found[0] - found[1]).abs().max() > 1e-3, "something is unsent"


def test_a_dense_start_counts_gradients_by_samples_and_weights_from_its_end() -> None:
    dense, large = trained(after(4, LocalSGD(every=3, delay=0, dense=0)), 3), of_one_large_batch(3)
    torch.testing.assert_close(dense[:, 3], large[3].expand(3, -1), rtol=0, atol=1e-9)
    apart = trained(after(4, LocalSGD(every=1000, dense=0)), 3)[:, 5]
    counts = torch.tensor([sum(size(rank, step) for step in (4, 5)) for rank in range(3)], dtype=torch.float64)
    mean = (apart * (counts / counts.sum()).unsqueeze(1)).sum(0)
    torch.testing.assert_close(dense[:, 5], mean.expand(3, -1), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "algorithm",
    [
        DiLoCo(every=3, delay=0, dense=0),
        streaming_diloco(every=4, fragments=2, delay=1, dense=0),
        after(2, LocalSGD(every=3, dense=0)),
        DESLOC(every=3, first=2, dense=0),
        ScatterReduce(gather_below=0),
    ],
    ids=repr,
)
def test_a_run_resumed_anywhere_counts_the_same_samples(algorithm: Algorithm) -> None:
    through = trained(algorithm, 3)
    for resume_at in range(1, STEPS):
        assert torch.equal(trained(algorithm, 3, resume_at=resume_at), through), resume_at


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (Gossip(), "keep the plain mean of all workers"),
        (DiLoCo(every=3, averaging=Gossip()), "keep the plain mean of all workers"),
        (EagerDiLoCo(every=3), "keep the plain mean of all workers"),
        (sparta(LocalSGD(every=3)), "keep the plain mean of all workers"),
        (Hierarchical(LocalSGD(every=3), ranks_per_node=1), "keep the plain mean of all workers"),
        (after(3, Gossip()), "keep the plain mean of all workers"),
    ],
    ids=repr,
)
def test_what_cannot_be_weighed_says_why(algorithm: Algorithm, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        trained(algorithm, 2)


def test_a_forgotten_call_is_named() -> None:
    def body(rank: int) -> None:
        model = model_of()
        replica = gossamer.replicate(model, sgd(model))
        for step in range(2):
            if step == 0 or rank != 1:
                replica.weigh(2)
            loss(model, batch(0, 0)).backward()
        replica.close()

    with pytest.raises(UsageError, match=r"rank 1: weigh\(\) was called before other passes, and not before that of step 1"):
        loopback(body, 3)


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), "many", None])
def test_numbers_of_samples_that_are_none(samples: Any) -> None:
    def body(rank: int) -> None:
        model = model_of()
        gossamer.replicate(model, sgd(model)).weigh(samples)

    with pytest.raises(ConfigurationError, match="takes a number of samples"):
        loopback(body, 2)


def test_the_first_call_is_not_inside_join() -> None:
    def body(rank: int) -> None:
        model = model_of()
        replica = gossamer.replicate(model, sgd(model))
        with replica.join():
            replica.weigh(3)

    with pytest.raises(UsageError, match=r"the first weigh\(\) inside join\(\)"):
        loopback(body, 2)


def test_other_refusals() -> None:
    def communicating(rank: int) -> None:
        model = model_of().float()
        gossamer.replicate(model, OneBitAdam(model.parameters())).weigh(1)

    def switched(rank: int) -> None:
        model = model_of()
        replica = gossamer.replicate(model, sgd(model))
        replica.weigh(0)
        replica.switch(Gossip())

    def measured(rank: int) -> None:
        model = model_of()
        gossamer.replicate(model, sgd(model), statistics=True).weigh(1)

    for body, message in (
        (communicating, "OneBitAdam communicates by itself"),
        (switched, "keep the plain mean"),
        (measured, "statistics=True measures"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            loopback(body, 2)


# -- late workers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("averaging", [AllReduce(), Gossip(wire="fp32")], ids=repr)
def test_late_deltas_are_in_a_later_mean(averaging: Algorithm) -> None:
    """One worker takes a third of the steps. The mean moves by the mean outer step of all deltas, whenever they come: at rate 1
    without momentum, by what all have learned."""
    slow, steps = 2, 36

    def body(rank: int) -> Tensor:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        algorithm = DiLoCo(every=4, lag=12, dense=0, rate=1.0, momentum=0.0, nesterov=False, averaging=averaging)
        replica = gossamer.replicate(model, optimizer, algorithm)
        learned = torch.zeros_like(weights(model))
        for step in range(steps // 3 if rank == slow else steps):
            optimizer.zero_grad()
            loss(model, batch(rank, step)).backward()
            learned -= 0.05 * torch.cat([p.grad.flatten() for p in model.parameters()])
            optimizer.step()
        replica.close(average=True)
        return torch.stack([weights(model), learned])

    found = torch.stack(loopback(body, 4))
    expected = weights(model_of()) + found[:, 1].mean(0)
    torch.testing.assert_close(found[:, 0], expected.expand(4, -1), rtol=0, atol=1e-9)


# -- workers out of line ---------------------------------------------------------------------------------------------


def apart(spoil: Callable[[Tensor], Tensor] | None, algorithm: Algorithm, spoilt: int = 1) -> list[tuple[Tensor, float]]:
    """Two periods; before the end of the second one, one rank's weights are spoilt. Of each rank, its weights and how many of
    its deltas were left out."""

    def body(rank: int) -> tuple[Tensor, float]:
        model = model_of()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for step in range(6):
            optimizer.zero_grad()
            loss(model, batch(rank, step)).backward()
            if step == 5 and rank == spoilt and spoil is not None:
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter.copy_(spoil(parameter))
            optimizer.step()
        replica.close()
        return weights(model), replica.metrics()["left_out"]

    return loopback(body, 4)


@pytest.mark.parametrize("averaging", [AllReduce(), ScatterReduce(gather_below=0, exact_vectors=False)], ids=repr)
@pytest.mark.parametrize("spoil", [lambda w: w + 100, lambda w: w * torch.nan, lambda w: w / 0], ids=["far", "nan", "inf"])
def test_a_worker_out_of_line_is_left_out_and_named(
    spoil: Callable[[Tensor], Tensor], averaging: Algorithm, caplog: pytest.LogCaptureFixture
) -> None:
    """The mean is that of the others, exactly: it is not moved by what is left out."""
    make = partial(DiLoCo, every=3, delay=0, averaging=averaging)
    with caplog.at_level(logging.WARNING, logger="gossamer"):
        spoilt = apart(spoil, make(outlier=5.0))
    assert [left_out for _, left_out in spoilt] == [0, 1, 0, 0]
    said = [record.getMessage() for record in caplog.records if "left out" in record.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("the outer delta of rank 1 is left out of the average of 0.weight")
    others = [found for rank, (found, _) in enumerate(spoilt) if rank != 1]
    for each in others:
        torch.testing.assert_close(each, others[0], rtol=0, atol=1e-12)
    if averaging == AllReduce():
        another = apart(lambda w: w - 1000, make(outlier=5.0))
        torch.testing.assert_close(another[0][0], others[0], rtol=0, atol=1e-9)


def test_workers_in_line_are_averaged_as_ever() -> None:
    """Also those that are equal, or nearly: the spread of norms is taken to be a tenth at least."""
    limited, free = (trained(DiLoCo(every=3, delay=0, outlier=limit), 4, weighed=False) for limit in (50.0, None))
    torch.testing.assert_close(limited, free, rtol=0, atol=1e-12)
    alike = apart(None, DiLoCo(every=3, delay=0, outlier=50.0))
    assert [left_out for _, left_out in alike] == [0, 0, 0, 0]


def pulled(strengths: Sequence[float], outlier: float | None, counts: Sequence[int] | None = None) -> Tensor:
    """Twelve steps of workers whose gradients are of these strengths: their average at the end. ``counts``: of samples."""

    def body(rank: int) -> Tensor:
        model = nn.Linear(6, 3, bias=False).double()
        nn.init.zeros_(model.weight)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = DiLoCo(every=3, dense=0, rate=1.0, momentum=0.0, delay=0, outlier=outlier)
        replica = gossamer.replicate(model, optimizer, outer)
        for _ in range(12):
            if counts is not None:
                replica.weigh(counts[rank])
            optimizer.zero_grad()
            (strengths[rank] * model(torch.ones(1, 6, dtype=torch.float64)).sum()).backward()
            optimizer.step()
        replica.close(average=True)
        return weights(model)

    return loopback(body, len(strengths))[0]


@pytest.mark.parametrize(
    ("strengths", "counts"),
    [
        ([1, 1.6, 1, 1.6], None),
        ([1, 1, 1.6, 1.6, 1, 1.6], None),
        ([0, 1, 0], [0, 4, 0]),
        ([1, 1.6, 9], [3, 4, 0]),
        ([0, 0, 1], None),
    ],
)  # fmt: skip
def test_half_of_the_workers_and_those_that_alone_have_samples_are_in_line(
    strengths: list[float], counts: list[int] | None
) -> None:
    torch.testing.assert_close(
        pulled(strengths, 5.0, counts), pulled(strengths, None, counts), rtol=0, atol=1e-12, msg="somebody was left out"
    )


def test_a_worker_out_of_line_among_an_even_number_is_left_out() -> None:
    torch.testing.assert_close(pulled([1, 1.6, 1, 90], 5.0), pulled([1, 1.6, 1], None), rtol=0, atol=1e-12)


def test_a_worker_that_is_not_finite_when_the_outer_loop_begins_is_left_out_and_told_what_to_do(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """After a dense start the first exchange is an average of weights. It is no average of the replicas, where its weights
    count as ever: there it is named too."""

    def body(rank: int) -> Tensor:
        model = model_of()
        optimizer = sgd(model)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=3, dense=4, outlier=5.0))
        for step in range(12):
            optimizer.zero_grad()
            loss(model, batch(rank, step)).backward()
            optimizer.step()
            if step == 4 and rank == 1:
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.nan)
        found = weights(model).clone()
        replica.close(average=True)
        return found

    with caplog.at_level(logging.WARNING, logger="gossamer"):
        found = loopback(body, 4)
    assert [bool(each.isfinite().all()) for each in found] == [True, False, True, True]
    assert "of rank 1 is left out" in caplog.text
    assert "load those of another rank into its model, or resume from a checkpoint" in caplog.text
    assert "rank 1: 4 parameters ('0.weight'" in caplog.text
    assert "are not finite, so that the average of the replicas is not either: load" in caplog.text


def test_where_the_only_worker_with_samples_is_left_out_the_others_keep_their_mean() -> None:
    """At the first exchange after a dense start, which is of the weights themselves."""

    def body(rank: int) -> Tensor:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        replica = gossamer.replicate(model, optimizer, DiLoCo(every=3, dense=2, delay=0, outlier=5.0))
        begin = weights(model).clone()
        for step in range(3):
            replica.weigh(4 if rank == 0 else 0)
            optimizer.zero_grad()
            loss(model, batch(rank, step)).backward()
            optimizer.step()
            if step == 1 and rank == 0:
                with torch.no_grad():
                    next(model.parameters()).fill_(torch.nan)
        replica.close()
        return weights(model) - begin

    for moved in loopback(body, 4)[1:]:
        torch.testing.assert_close(moved, torch.zeros_like(moved), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DiLoCo(outlier=0.0), "must be the z-score above which"),
        (lambda: DiLoCo(outlier="3"), "must be the z-score above which"),
        (lambda: DiLoCo(outlier=5.0, averaging=Gossip()), "peers do not know what is in line"),
        (lambda: EagerDiLoCo(outlier=5.0), "neither delay nor merge, lag or outlier"),
        (lambda: trained(DiLoCo(every=3, outlier=5.0), 2), "takes three workers"),
        (lambda: LocalSGD(lag=-1), "lag must be a number of steps"),
        (lambda: EagerDiLoCo(lag=3), "neither delay nor merge, lag or outlier"),
        (lambda: DiLoCo(every=3, dense=2, lag=3), "dense=2 averages .* lag=3 lets them lag; set dense=0 or lag=0"),
        (lambda: sparta(DiLoCo(every=3, outlier=5.0)), "or leaves some out: .* no outlier"),
        (lambda: in_parts(2, DiLoCo(every=3, lag=3)), "lets them lag; set lag=0"),
        (lambda: SparseLoCo(outlier=-1.0), "must be the z-score above which"),
    ],
)
def test_bad_values(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_virtual_time_counts_the_message_of_norms() -> None:
    """Sixteen bytes to each of the others per exchange, and the time of one more round of messages."""
    given: dict[str, Any] = {
        "world": 4, "link": Link(bandwidth=1e6, latency=0.01), "compute": Compute(forward=0, backward=0), "steps": 12,
    }  # fmt: skip
    plain, limited = (
        step_time(nn.Linear(8, 8, device="meta"), DiLoCo(every=3, delay=0, outlier=outlier), **given) for outlier in (None, 5.0)
    )
    assert limited.bytes_per_step - plain.bytes_per_step == pytest.approx(3 * 16 / 3)
    assert limited.step_seconds > plain.step_seconds
