"""A few bits of each weight's place: what neighbours hold is known from one's own, and rounding follows their distance."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import gossamer
from gossamer import QuantizedGossip, loopback
from gossamer.algorithms.quantized_gossip import nearest, pack, unpack
from gossamer.codecs import Quantize
from gossamer.comm.topology import Complete, Dissemination, Hypercube, RandomMatching, Ring, Topology, rotated
from gossamer.errors import ConfigurationError

from ..contracts.cases import exchange, gossip, noise, stacked, tap


@pytest.mark.parametrize("bits", [8, 4])
@given(st.lists(st.integers(-(2**24), 2**24), max_size=40))
def test_packing_keeps_the_last_bits(bits: int, places: list[int]) -> None:
    tensor = torch.tensor(places, dtype=torch.int32)
    packed = pack(tensor, bits)
    assert packed.numel() == -(-len(places) * bits // 8) + 8
    assert unpack(packed, bits, len(places)).tolist() == [place % 2**bits for place in places]


@pytest.mark.parametrize("bits", [8, 4])
@given(st.integers(-(2**24), 2**24), st.data())
def test_the_nearest_place_is_the_senders(bits: int, place: int, data: st.DataObject) -> None:
    away = data.draw(st.integers(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1))
    packed = pack(torch.tensor([place + away], dtype=torch.int32), bits)
    ahead, true = nearest(packed, torch.tensor([place], dtype=torch.int32), bits)
    assert (ahead.tolist(), bool(true)) == ([away], True)


@pytest.mark.parametrize("bits", [8, 4])
@given(st.integers(-(2**24), 2**24), st.integers(1, 2**20), st.sampled_from([-1, 1]))
def test_what_is_further_away_is_found_out(bits: int, place: int, turns: int, sign: int) -> None:
    packed = pack(torch.tensor([place + sign * turns * 2**bits, 5], dtype=torch.int32), bits)
    assert not nearest(packed, torch.tensor([place, 5], dtype=torch.int32), bits)[1]


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("wrong", [(1, -1), (2, -1, -1), (1, -2, 1), (3, -3), (8, -8)])
@pytest.mark.parametrize("apart", [1, 10, 2**16])
def test_turns_up_and_down_do_not_hide_each_other(bits: int, wrong: tuple[int, ...], apart: int) -> None:
    places = torch.arange(3 * 2**16, dtype=torch.int32)
    sent = places.clone()
    for number, turns in enumerate(wrong):
        sent[5 + number * apart] += turns * 2**bits
    assert nearest(pack(places, bits), places, bits)[1]
    assert not nearest(pack(sent, bits), places, bits)[1]


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
    """The first exchange is in full precision; then so many bits, and the maximum of two numbers per parameter."""
    tape: dict = {}
    exchange(tap(QuantizedGossip(), tape), [noise(4, 4096)] * 2)
    sent = [[line for line in tape[step, 0] if line.startswith("start")] for step in range(2)]
    assert ["float32[4096]" in line for line in sent[0]].count(True) == 4
    assert ["uint8[2056]" in line for line in sent[1]].count(True) == 4
    assert ["float64[2, 1]" in line for line in sent[1]].count(True) == 2 * 4, "two hops of dissemination"


def test_a_leap_is_noticed_and_made_good() -> None:
    """A worker that moves away by more than the grid can tell: the next exchange is in full precision, and exact."""
    close = [torch.full((50,), 1.0) + tensor * 1e-3 for tensor in noise(4, 50)]
    apart = [tensor + rank for rank, tensor in enumerate(close)]
    outcomes = exchange(QuantizedGossip(topology=Complete()), [close, close, apart, apart])
    mean = torch.stack(apart).mean(0)
    assert torch.count_nonzero(stacked(outcomes, 1)) > 0
    assert torch.count_nonzero(stacked(outcomes, 2)) == 0, "nothing false is added"
    assert torch.allclose(torch.stack(apart) + stacked(outcomes, 3), mean.expand(4, 50), atol=1e-6)


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
    assert distance(QuantizedGossip(bits=4)) < 1.5 * distance(gossamer.Gossip(wire="fp32"))


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
