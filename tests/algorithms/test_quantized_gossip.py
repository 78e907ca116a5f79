"""A few bits of each weight's place: what neighbours hold is known from one's own, and rounding follows their distance."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import QuantizedGossip, loopback
from gossamer.codecs import Quantize
from gossamer.codecs.modulo import BLOCK
from gossamer.comm.topology import Complete, Dissemination, Hypercube, RandomMatching, Ring, Topology, rotated
from gossamer.errors import ConfigurationError

from ..contracts.cases import exchange, gossip, noise, stacked, tap


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("world", [2, 3, 4, 7, 16, 24])
@pytest.mark.parametrize(
    "topology", [Dissemination(), rotated(Dissemination()), Ring(), RandomMatching(), Complete(), Hypercube()], ids=repr
)
def test_the_mean_of_the_weights_stays(bits: int, world: int, topology: Topology) -> None:
    if isinstance(topology, Hypercube) and world & (world - 1):
        pytest.skip("a hypercube has 2^k corners")
    tensors = [tensor + 3 for tensor in noise(world, 70, torch.float64)]
    together = torch.stack(gossip(QuantizedGossip(bits=bits, topology=topology), tensors, 12))
    assert (together.mean(0) - torch.stack(tensors).mean(0)).abs().max() < 1e-13


@pytest.mark.parametrize("bits", [8, 4])
def test_replicas_come_as_close_as_single_precision_allows(bits: int) -> None:
    """Plain rounding of the weights to so many bits stops far away."""
    tensors = [tensor + 10 for tensor in noise(6, 600)]
    together = torch.stack(gossip(QuantizedGossip(bits=bits), tensors, 150))
    assert (together - together.mean(0)).abs().max() < 1e-4
    assert (
        Quantize(bits=bits).decode(Quantize(bits=bits).encode(tensors[0]), 600, torch.float32) - tensors[0]
    ).abs().max() > 0.01


def test_bytes() -> None:
    """The first exchange is in full precision; then so many bits, and a maximum of 2 bytes per block."""
    tape: dict = {}
    exchange(tap(QuantizedGossip(), tape), [noise(4, 4096)] * 2)
    sent = [[line for line in tape[step, 0] if line.startswith("start")] for step in range(2)]
    assert ["float32[4096]" in line for line in sent[0]].count(True) == 4
    assert ["uint8[2080]" in line for line in sent[1]].count(True) == 4
    assert ["bfloat16[8]" in line for line in sent[1]].count(True) == 2 * 4, "two hops of dissemination"


def test_a_leap_is_noticed_and_made_good() -> None:
    """One worker moves away by more than its grid can tell, in one block: only this block waits, until its grid is wide
    enough."""
    algorithm, exchanges = QuantizedGossip(topology=Complete()), 9
    close = [torch.full((3 * BLOCK,), 1.0) + tensor * 1e-3 for tensor in noise(4, 3 * BLOCK)]
    apart = [tensor.clone() for tensor in close]
    apart[2][BLOCK + 5] += 0.1
    outcomes = exchange(algorithm, [close, close, *[apart] * exchanges])
    deltas = [stacked(outcomes, 2 + number).view(4, 3, BLOCK) for number in range(exchanges)]
    assert all(delta[:, ::2].any() for delta in deltas), "the others go on"
    told = [bool(delta[:, 1].any()) for delta in deltas]
    assert not told[0], "nothing false is added"
    assert told == sorted(told), "once it is wide enough, it stays so for a cycle"
    mean = torch.stack(apart).mean(0)
    landed = torch.stack(apart) + stacked(outcomes, 2 + told.index(True))
    assert (landed - mean).abs().max() < 0.02, "a step of the wide grid"
    for delta in deltas:
        assert delta.sum(0).abs().max() < 1e-6


def distance(algorithm: gossamer.Algorithm, world: int = 6, steps: int = 80) -> float:
    """The consensus distance after training with data that differ between workers."""

    def body(rank: int) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(20, 50), nn.Tanh(), nn.Linear(50, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        replica = gossamer.replicate(model, optimizer, algorithm)
        teacher = torch.linspace(-1, 1, 20)
        for number in range(steps):
            inputs = torch.randn(16, 20, generator=torch.Generator().manual_seed(100 * number + rank))
            optimizer.zero_grad()
            nn.functional.mse_loss(model(inputs).squeeze(1), inputs @ teacher).backward()
            optimizer.step()
        return replica.consensus_distance()

    return max(loopback(body, world))


def test_four_bits_keep_replicas_within_one_percent() -> None:
    assert distance(QuantizedGossip(bits=4)) < 0.01
    assert distance(QuantizedGossip(bits=4)) < 1.3 * distance(gossamer.Gossip(wire="fp32"))


def test_a_weight_that_breaks_later_is_seen_by_others() -> None:
    good = [torch.ones(9) + tensor * 1e-3 for tensor in noise(4, 9)]
    bad: list[Tensor] = [tensor.clone() for tensor in good]
    bad[2][5] = float("nan")
    outcomes = exchange(QuantizedGossip(), [good, good, bad, bad, bad])
    assert any(not outcome.results[step].isfinite().all() for outcome in outcomes for step in (3, 4))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: QuantizedGossip(bits=3), "bits must be one of 8, 4;"),  # type: ignore[arg-type]
        (lambda: QuantizedGossip(topology="ring"), "topology must be one of"),  # type: ignore[arg-type]
        (lambda: QuantizedGossip(every=0), "every must be a number of steps"),
        (lambda: QuantizedGossip(topology=Hypercube()).check(6), "power of two"),
    ],
)
def test_bad_input(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()
