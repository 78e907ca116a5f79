"""Compressed differences to replicas of the neighbours: the mean stays, and the codec's error goes away."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import gossamer
from gossamer import Gossip, LowPrecisionDecentralized, loopback
from gossamer.codecs import Codec, ErrorFeedback, Quantize, RandomK, Sign, TopChunks, TopK
from gossamer.comm.topology import Complete, Dissemination, Ring, Topology, rotated
from gossamer.errors import ConfigurationError

from ..contracts.cases import Outcome, exchange, gossip, noise, stacked, tap

CODECS = [Quantize(), Quantize(bits=4), Quantize(bits=4, rounding="stochastic"), Quantize(bits=2), Sign()]


@pytest.mark.parametrize("codec", CODECS, ids=repr)
@pytest.mark.parametrize("world", [2, 3, 5, 8, 24])
@pytest.mark.parametrize("topology", [Ring(), Ring(directed=True), Complete()], ids=repr)
def test_the_mean_of_the_weights_stays(codec: Codec, world: int, topology: Ring) -> None:
    tensors = noise(world, 70, torch.float64)
    together = torch.stack(gossip(LowPrecisionDecentralized(codec=codec, topology=topology, rate=0.3), tensors, 9))
    assert (together.mean(0) - torch.stack(tensors).mean(0)).abs().max() < 1e-13


@pytest.mark.parametrize("codec", [Quantize(), Quantize(bits=4)], ids=repr)
def test_the_codecs_error_goes_away(codec: Codec) -> None:
    """Rounded weights cannot come closer than the rounding; compressed differences go on."""
    tensors = [tensor + 10 for tensor in noise(8, 600)]
    together = torch.stack(gossip(LowPrecisionDecentralized(codec=codec), tensors, 120))
    rounded = torch.stack([codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype) for tensor in together])
    assert together.std(0).norm() < 0.01 * (rounded - together).norm()


def test_the_first_exchange_is_exact_and_the_others_are_short() -> None:
    tape: dict = {}
    tensors = noise(4, 4096)
    outcomes = exchange(tap(LowPrecisionDecentralized(), tape), [tensors] * 2)
    exact = exchange(Gossip(wire="fp32", topology=Ring()), [tensors])
    assert torch.allclose(stacked(outcomes, 0), stacked(exact, 0), atol=1e-6)
    sent = [[line for line in tape[step, 0] if line.startswith("start")] for step in range(2)]
    assert all("permute(float32[4096]" in line for line in sent[0])
    assert all("permute(uint8[4160]" in line for line in sent[1]), "a byte per element, and eight per block of 512"


def test_replicas_are_what_the_neighbours_have() -> None:
    outcomes = exchange(LowPrecisionDecentralized(codec=Quantize(bits=2)), [noise(5, 33, seed=step) for step in range(4)])
    assert_replicas_are_the_neighbours(outcomes)


def assert_replicas_are_the_neighbours(outcomes: list[Outcome]) -> None:
    """On a ring of five."""
    for rank, outcome in enumerate(outcomes):
        for key in (key for key in outcome.state if "neighbour" in key):
            others = [outcomes[other].state["replica"] for other in ((rank + 1) % 5, (rank - 1) % 5)]
            assert any(torch.equal(outcome.state[key], other) for other in others)


@pytest.mark.parametrize("codec", [*CODECS, TopK(density=0.3), RandomK(density=0.3)], ids=repr)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("when", [0, 2])
def test_what_was_not_finite_is_forgotten_once_weights_are_mended(codec: Codec, broken: float, when: int) -> None:
    """And those who keep replicas of each other go on having the same."""
    steps = [noise(5, 33, seed=step) for step in range(6)]
    steps[when][1][7] = broken
    outcomes = exchange(LowPrecisionDecentralized(codec=codec), steps)
    assert not any(outcomes[rank].results[when].isfinite().all() for rank in (0, 1, 2))
    for number in {*range(6)} - {when}:
        assert stacked(outcomes, number).isfinite().all()
    assert_replicas_are_the_neighbours(outcomes)


@pytest.mark.parametrize("codec", [Quantize(), Quantize(bits=4)], ids=repr)
def test_training_stays_together(codec: Codec) -> None:
    """Within one percent of the weights, with data that differ between workers."""

    def body(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, LowPrecisionDecentralized(codec=codec))
        teacher = torch.linspace(-1, 1, 20)
        for number in range(80):
            inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * number + rank))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ teacher).backward()
            optimizer.step()
        return replica.consensus_distance()

    assert all(distance < 0.01 for distance in loopback(body, 6))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: LowPrecisionDecentralized(codec=ErrorFeedback(Quantize())), "give the codec alone"),
        (lambda: LowPrecisionDecentralized(codec=8), "codec must be a codec"),  # type: ignore[arg-type]
        (lambda: LowPrecisionDecentralized(rate=0), "rate must be a number above 0"),
        (lambda: LowPrecisionDecentralized(rate=True), "rate must be a number above 0"),
        (lambda: LowPrecisionDecentralized(codec=RandomK(unbiased=True)), "makes what it encodes longer"),
        (lambda: LowPrecisionDecentralized(topology="ring"), "topology must be one of"),  # type: ignore[arg-type]
        (lambda: LowPrecisionDecentralized(every=0), "every must be a number of steps"),
        (lambda: LowPrecisionDecentralized(topology=Dissemination()).check(4), "must be the same in every step"),
        (lambda: LowPrecisionDecentralized(topology=rotated(Ring())).check(4), "must be the same in every step"),
    ],
)
def test_bad_input(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


COARSE = [
    Quantize(bits=2, rounding="stochastic"),
    Sign(),
    TopK(density=0.1),
    RandomK(density=0.1),
    TopChunks(density=0.1, chunk=16),
]


@pytest.mark.parametrize("topology", [Ring(), pytest.param(Complete(), marks=pytest.mark.slow)], ids=repr)
@pytest.mark.parametrize("codec", COARSE, ids=repr)
def test_coarse_codecs_bring_replicas_closer_at_the_default_rate(codec: Codec, topology: Topology) -> None:
    tensors = noise(5, 300, torch.float64)
    together = torch.stack(gossip(LowPrecisionDecentralized(codec=codec, topology=topology), tensors, 400))
    before = torch.stack(tensors)
    assert (together - together.mean(0)).norm() < 0.2 * (before - before.mean(0)).norm()
    assert (together.mean(0) - before.mean(0)).abs().max() < 1e-12


def test_with_too_large_a_rate_they_would_run_away() -> None:
    """The law above can fail."""
    tensors = noise(5, 300, torch.float64)
    together = torch.stack(gossip(LowPrecisionDecentralized(codec=TopK(density=0.1), rate=1), tensors, 100))
    assert (together - together.mean(0)).norm() > 10 * torch.stack(tensors).norm()
