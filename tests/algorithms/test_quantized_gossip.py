"""A few bits of each weight's place: what neighbours hold is known from one's own, and rounding follows their distance."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import gossamer
from gossamer import QuantizedGossip, loopback, memory
from gossamer.algorithms.quantized_gossip import SEEN, least
from gossamer.codecs import Quantize
from gossamer.codecs.modulo import BLOCK, ModuloGrid, reach
from gossamer.comm.topology import Complete, Dissemination, Hypercube, RandomMatching, Ring, Topology, rotated
from gossamer.errors import ConfigurationError

from ..contracts.cases import exchange, gossip, noise, same_bits, stacked, tap


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


@pytest.mark.parametrize("piece", [2**16, BLOCK])
def test_a_leap_is_noticed_and_made_good(monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """One worker moves away by more than its grid can tell, in one block: only this block waits, until its grid is wide
    enough."""
    monkeypatch.setattr(memory, "_PORTION", piece)
    algorithm, exchanges = QuantizedGossip(topology=Complete()), 9
    close = [torch.full((3 * BLOCK,), 1.0) + tensor * 1e-3 for tensor in noise(4, 3 * BLOCK)]
    apart = [tensor.clone() for tensor in close]
    apart[2][BLOCK + 5] += 0.1
    outcomes = exchange(algorithm, [close, close, *[apart] * exchanges])
    deltas = [stacked(outcomes, 2 + number).view(4, 3, BLOCK) for number in range(exchanges)]
    assert all(delta[:, ::2].any() for delta in deltas), "the others go on"
    told = [bool(delta[:, 1].any()) for delta in deltas]
    assert not told[0], "nothing false is added"
    assert told.index(True) <= 3, "twice as wide, then 8 times, then 32"
    assert told == sorted(told), "once it is wide enough, it stays so for a cycle"
    applied = torch.stack(apart) + stacked(outcomes, exchanges + 1)
    assert (applied - torch.stack(apart).mean(0)).abs().max() < 0.02, "a step of the grid that is wide enough"
    for delta in deltas:
        assert delta.sum(0).abs().max() < 1e-6


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("before", "leap", "within"), [(1.0, 1e-3, 6), (1.0, 0.1, 9), (0.0, 1e-3, 17), (0.0, 1.0, 22)])
@pytest.mark.parametrize("moved", [1, 2, BLOCK], ids="of {}".format)
def test_workers_that_were_equal_may_begin_to_differ(bits: int, before: float, leap: float, within: int, moved: int) -> None:
    """As where the learning rate begins at zero, or weights behind a gate that does: the grid is too fine by far."""
    equal = [torch.full((600,), before)] * 4
    apart = [tensor.clone() for tensor in equal]
    apart[1][:moved] += leap
    outcomes = exchange(QuantizedGossip(bits=bits, topology=Complete()), [equal, *[apart] * within])
    applied = torch.stack(apart) + stacked(outcomes, within)
    assert (applied - torch.stack(apart).mean(0)).abs().max() < 0.5 * leap
    for number in range(within + 1):
        assert stacked(outcomes, number).sum(0).abs().max() <= 1e-6 * leap


@pytest.mark.parametrize("bits", [8, 4])
def test_all_workers_remember_the_same(bits: int) -> None:
    """Else one would add what another does not."""
    drift = [noise(5, 1300, seed=number) for number in range(12)]
    for number, tensors in enumerate(drift):
        for tensor in tensors:
            tensor[:BLOCK] *= 3**number
    first, *others = [outcome.state.extra(SEEN) for outcome in exchange(QuantizedGossip(bits=bits), drift)]
    assert first is not None
    assert (first[:, 0] < 0).any(), "blocks that were not understood"
    assert (first[:, 2] > 0).all(), "and others"
    assert all(other is not None and same_bits(other, first) for other in others)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [1.0, 1e-4])
def test_weights_in_half_the_width(dtype: torch.dtype, size: float) -> None:
    weights = [(size + 0.02 * size * tensor).to(dtype) for tensor in noise(4, 600)]
    outcomes = exchange(QuantizedGossip(bits=8, topology=Complete()), [weights] * 3)
    applied = torch.stack(weights).double() + stacked(outcomes, 2).double()
    assert (applied - torch.stack(weights).double().mean(0)).abs().max() < 0.005 * size


def test_places_that_no_integer_can_hold_are_not_understood() -> None:
    weights = torch.cat([torch.ones(BLOCK), torch.full((BLOCK,), 100.0)])
    steps = least(reach(weights), ModuloGrid(4, torch.full((2,), 2.0**-26)))
    assert steps.tolist() == [2.0**-20, float("inf")]


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


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
def test_a_weight_that_breaks_is_seen_by_all(broken: float) -> None:
    good = [torch.ones(9) + tensor * 1e-3 for tensor in noise(4, 9)]
    bad: list[Tensor] = [tensor.clone() for tensor in good]
    bad[2][5] = broken
    outcomes = exchange(QuantizedGossip(), [good, good, bad])
    assert stacked(outcomes, 1).isfinite().all()
    assert all(outcome.results[2].isnan().any() for outcome in outcomes)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: QuantizedGossip(bits=3), "bits must be one of 8, 4;"),  # type: ignore[arg-type]
        (lambda: QuantizedGossip(bits=4.0), "bits must be one of 8, 4; got 4.0"),  # type: ignore[arg-type]
        (lambda: QuantizedGossip(topology="ring"), "topology must be one of"),  # type: ignore[arg-type]
        (lambda: QuantizedGossip(every=0), "every must be a number of steps"),
        (lambda: QuantizedGossip(topology=Hypercube()).check(6), "power of two"),
    ],
)
def test_bad_input(make: Callable[[], object], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        make()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("when", [0, 2])
def test_what_was_not_finite_is_forgotten_once_weights_are_mended(bits: int, broken: float, when: int) -> None:
    """Also where that was in the first exchange, and no grid was known."""
    good = [torch.ones(3 * BLOCK) + tensor * 1e-3 for tensor in noise(4, 3 * BLOCK)]
    bad = [tensor.clone() for tensor in good]
    bad[2][BLOCK + 5] = broken
    steps = [good] * 10
    steps[when] = bad
    outcomes = exchange(QuantizedGossip(bits=bits, topology=Complete()), steps)  # type: ignore[arg-type]
    assert not any(outcome.results[when].isfinite().all() for outcome in outcomes)
    for number in {*range(10)} - {when}:
        assert stacked(outcomes, number).isfinite().all()
    applied = torch.stack(good) + stacked(outcomes, 9)
    assert (applied - torch.stack(good).mean(0)).abs().max() < 2e-3, "two steps of the grid"
