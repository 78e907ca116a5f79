"""What an algorithm has kept is handed over in one place: the sum that exchanges conserve survives a change of algorithms."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import AllReduce, Gossip, Hierarchical, LocalSGD, PushSum, QuantizedGossip, ScatterReduce, after, loopback
from gossamer.algorithms import Algorithm
from gossamer.algorithms.base import Context
from gossamer.algorithms.blocks.gathered import Gathered
from gossamer.codecs import TopPerChunk
from gossamer.comm.digraph import RandomPush
from gossamer.comm.ops import drive
from gossamer.state import State

from ..contracts.cases import bucket_of, exchange, noise
from ..contracts.laws import MetaPort

WORLD, STEPS = 4, 8

PUSHED = PushSum(topology=RandomPush())


class Given(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, dtype=torch.float64))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum()


def trained(algorithm: Algorithm, world: int = WORLD, average: bool = True) -> Tensor:
    """Every rank's weights after some steps in which rank r's gradient is r."""

    def body(rank: int) -> Tensor:
        model = Given()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        replica = gossamer.replicate(model, optimizer, algorithm)
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.full((8,), float(rank), dtype=torch.float64)).backward()
            optimizer.step()
        replica.close(average=average)
        return model.weight.detach().clone()

    return torch.stack(loopback(body, world))


@pytest.mark.parametrize(
    "then",
    [
        Gossip(wire="fp32"),
        Gossip(wire="fp32", every=2),
        PUSHED,
        LocalSGD(every=2),
        LocalSGD(every=4, delay=0, merge=0.5),
        QuantizedGossip(),
        AllReduce(),
    ],
    ids=repr,
)
@pytest.mark.parametrize("steps", [3, 4])
def test_the_mean_of_push_sum_survives_a_change(then: Algorithm, steps: int) -> None:
    """Replicas count as their push-sum weights say; at the change all go on from the average by weight."""
    whole = trained(after(steps, then, before=PUSHED))
    coarse = 0.1 if isinstance(then, QuantizedGossip) else 1e-9
    assert (whole.mean(0) + STEPS * 1.5).abs().max() < coarse


def test_the_mean_of_push_sum_between_nodes_survives_a_change() -> None:
    before = Hierarchical(PUSHED, ranks_per_node=2)
    assert (trained(after(3, Gossip(wire="fp32"), before=before)).mean(0) + STEPS * 1.5).abs().max() < 1e-9


@pytest.mark.parametrize("then", [PUSHED, Gossip(wire="fp32")], ids=repr)
def test_phases_that_are_nested_hand_over_as_those_in_a_row(then: Algorithm) -> None:
    nested = after(5, then, before=after(2, PUSHED, before=Gossip(wire="fp32")))
    in_a_row = after(2, after(5, then, before=PUSHED), before=Gossip(wire="fp32"))
    assert nested == in_a_row
    assert (trained(nested).mean(0) + STEPS * 1.5).abs().max() < 1e-9


@pytest.mark.parametrize("decay", [1.0, 0.5])
def test_what_fades_is_handed_over_as_it_would_be_sent_next(decay: float) -> None:
    """In the first of eight steps one of eight equal elements is sent."""
    before = Gathered(codec=TopPerChunk(density=1 / 8), decay=decay, residual="fp32")
    moved = (-trained(after(1, AllReduce(), before=before)) / 1.5).sort(dim=1).values
    torch.testing.assert_close(moved, torch.tensor([[7 + decay] * 7 + [8.0]] * WORLD).double().sort().values, rtol=0, atol=1e-6)


@pytest.mark.parametrize("make", [Gathered, partial(ScatterReduce, exact_vectors=False)])
def test_what_fades_does_so_among_one_worker_too(make: Callable[..., Algorithm]) -> None:
    """Sent + kept = decay·had + tensor, also where the others have left."""
    algorithm = make(codec=TopPerChunk(density=0.2), decay=0.5, residual="fp32")
    (last,) = noise(1, 20, torch.float64, seed=1)
    state, bucket = exchange(algorithm, [noise(2, 20, torch.float64)])[0].state, bucket_of([(20,)], torch.float64)
    bucket.flat.copy_(last)
    had = state["residual"].clone()
    assert had.abs().max() > 0
    sent = drive(algorithm.exchange(bucket, state, Context(1, 0, (0,))), MetaPort(1))
    torch.testing.assert_close(sent, 0.5 * had + last, rtol=0, atol=1e-12)
    assert not state["residual"].any()


def test_where_nothing_is_kept_what_is_handed_over_is_what_was_given() -> None:
    flat, ctx = torch.ones(5), Context(3, 0, (0, 1))
    for algorithm in (AllReduce(), Gossip(), after(2, Gossip(), before=AllReduce())):
        assert algorithm.hand_over(flat, State(flat), ctx) is flat
