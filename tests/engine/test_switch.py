"""A replica goes on with another algorithm between two steps: nothing that was not sent is lost, and counters go on."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import (
    AllReduce,
    ChunkSparse,
    ConfigurationError,
    DiLoCo,
    DisagreementError,
    Gossip,
    Hierarchical,
    LocalSGD,
    PowerSGD,
    PushSum,
    Replica,
    ScatterReduce,
    UsageError,
    after,
    in_parts,
    loopback,
)
from gossamer.algorithms import Algorithm
from gossamer.codecs import Cast, Quantize, Sign
from gossamer.comm.digraph import RandomPush
from gossamer.optim import OneBitAdam

WORLD = 4

METHODS: tuple[Algorithm, ...] = (
    AllReduce(),
    ScatterReduce(codec=Quantize(bits=4), residual="fp32"),
    ScatterReduce(codec=Sign(), residual="fp32"),
    ChunkSparse(density=0.25, chunk=16, codec=Cast(wire="fp32"), residual="fp32"),
    PowerSGD(rank=1, residual="fp32"),
    Hierarchical(ScatterReduce(codec=Quantize(bits=4), residual="fp32"), ranks_per_node=2),
    after(2, ChunkSparse(density=0.25, chunk=16, codec=Cast(wire="fp32"), residual="fp32"), before=AllReduce()),
    Gossip(wire="fp32"),
    Gossip(wire="fp32", lag=1),
    in_parts(2, Gossip(wire="fp32")),
    LocalSGD(every=2),
    PushSum(topology=RandomPush()),
    Hierarchical(Gossip(wire="fp32"), ranks_per_node=2),
)


class Given(nn.Module):
    """Its gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8, 16))
        self.bias = nn.Parameter(torch.zeros(7))

    def forward(self, gradient: Tensor) -> Tensor:
        return (self.weight * gradient).sum() + (self.bias * gradient[0, :7]).sum()


def gradient(rank: int, step: int) -> Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(100 * rank + step))


def steps(model: Given, optimizer: torch.optim.Optimizer, rank: int, first: int, count: int) -> None:
    for step in range(first, first + count):
        optimizer.zero_grad()
        model(gradient(rank, step)).backward()
        optimizer.step()


def make(algorithm: Algorithm | None, **options: Any) -> tuple[Given, torch.optim.Optimizer, Replica]:
    model = Given()
    kind, momentum = options.pop("kind", torch.optim.SGD), options.pop("momentum", 0.0)
    own = {"momentum": momentum} if kind is torch.optim.SGD else {}
    optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=1.0, **own)
    return model, optimizer, gossamer.replicate(model, optimizer, algorithm, **options)


def expected(count: int) -> Tensor:
    """The weights after so many exact steps without momentum."""
    return -sum(torch.stack([gradient(rank, step) for rank in range(WORLD)]).mean(0) for step in range(count))  # type: ignore[return-value]


@pytest.mark.parametrize("before", METHODS, ids=repr)
@pytest.mark.parametrize("then", METHODS, ids=repr)
def test_every_gradient_arrives_whatever_takes_the_place_of_what(before: Algorithm, then: Algorithm) -> None:
    """At the end an exact exchange sends all that is unsent: the mean of the weights is that of exact steps."""

    def body(rank: int) -> Tensor:
        model, optimizer, replica = make(before)
        steps(model, optimizer, rank, 0, 5)
        replica.switch(then)
        steps(model, optimizer, rank, 5, 3)
        replica.switch(AllReduce())
        steps(model, optimizer, rank, 8, 1)
        assert replica.algorithm == AllReduce()
        replica.close()  # which compares the replicas
        return model.weight.detach().clone()

    for weights in loopback(body, WORLD):
        torch.testing.assert_close(weights, expected(9), atol=1e-4, rtol=1e-4)


def test_counters_go_on() -> None:
    def body(rank: int) -> tuple[int, float, float, int]:
        model, optimizer, replica = make(AllReduce())
        steps(model, optimizer, rank, 0, 3)
        sent = replica.metrics()["bytes_sent"]
        replica.switch(Gossip())
        steps(model, optimizer, rank, 3, 2)
        replica.switch(ScatterReduce())
        steps(model, optimizer, rank, 5, 2)
        return replica.step, sent, replica.metrics()["bytes_sent"], int(replica.metrics()["step"])

    for step, before, after_all, counted in loopback(body, WORLD):
        assert step == counted == 7
        assert after_all > before > 0


def test_replicas_that_were_apart_are_equal_where_gradients_are_exchanged_again() -> None:
    """With what their optimizers remember: momenta that differ would part them again."""

    def body(rank: int) -> tuple[float, float]:
        model, optimizer, replica = make(Gossip(), momentum=0.9)
        steps(model, optimizer, rank, 0, 4)
        apart = replica.consensus_distance()
        replica.switch(AllReduce())
        steps(model, optimizer, rank, 4, 4)
        return apart, replica.consensus_distance()

    for apart, equal in loopback(body, WORLD):
        assert apart > 0 == equal


def test_an_outer_optimizer_begins_from_equal_weights() -> None:
    def body(rank: int) -> Tensor:
        model, optimizer, replica = make(Gossip())
        steps(model, optimizer, rank, 0, 3)
        replica.switch(DiLoCo(every=2, rate=1.0, momentum=0.0, nesterov=False))
        steps(model, optimizer, rank, 3, 4)
        replica.close(average=True)
        return model.weight.detach().clone()

    for weights in loopback(body, WORLD):
        torch.testing.assert_close(weights, expected(7), atol=1e-4, rtol=1e-4)


def test_what_is_unsent_waits_for_a_parameter_that_is_used() -> None:
    """A pass in which nobody uses a parameter takes nothing of what is unsent of it."""

    def body(rank: int) -> Tensor:
        model, optimizer, replica = make(ChunkSparse(density=0.1, chunk=16, codec=Cast(wire="fp32"), residual="fp32"))
        steps(model, optimizer, rank, 0, 4)
        replica.switch(AllReduce())
        optimizer.zero_grad()
        (model.bias * gradient(rank, 4)[0, :7]).sum().backward()
        assert model.weight.grad is None
        optimizer.step()
        steps(model, optimizer, rank, 5, 1)
        return model.weight.detach() - gradient_mean(4)

    for weights in loopback(body, WORLD):
        torch.testing.assert_close(weights, expected(6), atol=1e-4, rtol=1e-4)


def gradient_mean(step: int) -> Tensor:
    return torch.stack([gradient(rank, step) for rank in range(WORLD)]).mean(0)


@pytest.mark.parametrize("overlap", [False, True])
def test_it_works_with_forward_overlap(overlap: bool) -> None:
    def body(rank: int) -> Tensor:
        model, optimizer, replica = make(ScatterReduce(codec=Sign(), residual="fp32"), overlap_forward=overlap)
        steps(model, optimizer, rank, 0, 6)
        replica.switch(AllReduce())
        steps(model, optimizer, rank, 6, 5)
        replica.close()
        return model.weight.detach().clone()

    for weights in loopback(body, WORLD):
        torch.testing.assert_close(weights, expected(11), atol=1e-4, rtol=1e-4)


def test_a_state_saved_after_a_switch_is_one_of_the_new_algorithm() -> None:
    def body(rank: int) -> None:
        model, optimizer, replica = make(ChunkSparse(density=0.25, chunk=16, codec=Cast(wire="fp32"), residual="fp32"))
        steps(model, optimizer, rank, 0, 3)
        replica.switch(ScatterReduce())
        steps(model, optimizer, rank, 3, 2)
        saved = replica.state_dict()
        replica.close()
        again = gossamer.replicate(model, optimizer, ScatterReduce())
        again.load_state_dict(saved)
        assert again.step == 5
        again.close()

    loopback(body, WORLD)


def test_ranks_that_mean_different_algorithms_are_told() -> None:
    def body(rank: int) -> None:
        model, optimizer, replica = make(AllReduce())
        steps(model, optimizer, rank, 0, 1)
        replica.switch(Gossip(every=1 + rank % 2))

    with pytest.raises(DisagreementError, match="the algorithm to switch to"):
        loopback(body, WORLD)


def test_one_that_cannot_run_leaves_the_replica_as_it_was() -> None:
    def body(rank: int) -> Tensor:
        model, optimizer, replica = make(AllReduce(), kind=torch.optim.AdamW)
        steps(model, optimizer, rank, 0, 2)
        with pytest.raises(ConfigurationError, match="momentum"):
            replica.switch(ChunkSparse(momentum_correction=True))
        with pytest.raises(ConfigurationError, match="must be an instance"):
            replica.switch(Gossip)  # type: ignore[arg-type]
        steps(model, optimizer, rank, 2, 2)
        assert replica.algorithm == AllReduce()
        return model.weight.detach().clone()

    def usual(rank: int) -> Tensor:
        model, optimizer, _ = make(AllReduce(), kind=torch.optim.AdamW)
        steps(model, optimizer, rank, 0, 4)
        return model.weight.detach().clone()

    assert torch.equal(torch.stack(loopback(body, WORLD)), torch.stack(loopback(usual, WORLD)))


def test_it_is_refused_between_backward_and_step() -> None:
    def body(rank: int) -> None:
        model, _, replica = make(AllReduce())
        model(gradient(rank, 0)).backward()
        with pytest.raises(UsageError, match="after the step"):
            replica.switch(Gossip())

    loopback(body, 2)


def test_an_optimizer_that_communicates_has_nothing_to_switch() -> None:
    def body(rank: int) -> None:
        model = Given()
        optimizer = OneBitAdam(model.parameters())
        replica = gossamer.replicate(model, optimizer)
        with pytest.raises(ConfigurationError, match="communicates by itself"):
            replica.switch(AllReduce())

    loopback(partial(body), 2)
