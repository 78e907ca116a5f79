"""Gossip: half-way towards one partner, without losing anything of the mean."""

from collections.abc import Callable

import pytest
import torch

import gossamer
from gossamer import DecentralizedSGD, Gossip, GossipPGA, after, by_size
from gossamer.codecs import Cast
from gossamer.comm.topology import (
    FAMILY,
    Dissemination,
    Exchange,
    Hypercube,
    Permutation,
    Ring,
    Topology,
    dissemination,
    mixing_matrix,
    rotated,
)
from gossamer.errors import ConfigurationError

from ..contracts.cases import exchange, gossip, noise, stacked, tap


@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_the_delta_is_half_the_difference_of_what_was_sent(wire: str, world: int) -> None:
    tensors, codec = noise(world, 50), Cast(wire=wire)
    rounded = torch.stack([codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype) for tensor in tensors])
    outcomes = exchange(Gossip(wire=wire), [tensors] * 4)
    for step in range(4):
        partners = dissemination(step, world)
        theirs = rounded[[partners.source(rank) for rank in range(world)]]
        assert torch.equal(stacked(outcomes, step), (theirs - rounded) / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_difference_of_long_messages_is_right_to_the_last_element(dtype: torch.dtype) -> None:
    """More than is worked on at a time."""
    tensors, codec = noise(2, 200_003, dtype), Cast(wire="bf16")
    rounded = torch.stack([codec.decode(codec.encode(tensor), tensor.numel(), tensor.dtype) for tensor in tensors])
    found = stacked(exchange(Gossip(), [tensors]), 0)
    assert torch.equal(found, (rounded.flip(0) - rounded) / 2)


@pytest.mark.parametrize("topology", [Dissemination(), Ring()], ids=repr)
def test_weights_beyond_half_precision_stay_as_they_are(topology: Topology) -> None:
    """As running variances may be: inf − inf would be NaN. Where one is in range, the mean of the workers is kept."""
    tensors = [torch.tensor([1e6 * (rank + 1), -1e6, 60000.0 + 4000 * rank, 0.5 * rank]) for rank in range(4)]
    delta = stacked(exchange(Gossip(wire="fp16", topology=topology), [tensors]), 0)
    assert delta.isfinite().all()
    assert not delta[:, :2].any()
    assert torch.allclose(delta.sum(0), torch.zeros(4), rtol=0, atol=0.05)
    assert delta[:, 2:].any(1).all()


@pytest.mark.parametrize("broken", [float("inf"), -float("inf"), float("nan")])
def test_a_weight_that_broke_is_seen_in_half_precision_too(broken: float) -> None:
    tensors = [torch.tensor([broken if rank == 0 else 1.0, 2.0]) for rank in range(2)]
    delta = stacked(exchange(Gossip(wire="fp16"), [tensors]), 0)
    assert not delta[:, 0].isfinite().any()
    assert not delta[:, 1].any()


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 4])
def test_one_cycle_reaches_the_exact_mean_for_powers_of_two(exponent: int) -> None:
    tensors = noise(2**exponent, 50, torch.float64)
    for result in gossip(Gossip(wire="fp32"), tensors, exponent):
        assert torch.allclose(result, torch.stack(tensors).mean(0), rtol=0, atol=1e-15)


@pytest.mark.parametrize(("wire", "floor"), [("fp32", 1e-6), ("fp16", 1e-3), ("bf16", 8e-3)])
def test_the_consensus_is_as_close_as_the_wire_is_precise(wire: str, floor: float) -> None:
    tensors = noise(6, 200)
    together = torch.stack(gossip(Gossip(wire=wire), tensors, 60))
    assert (together - together.mean(0)).abs().max() < floor * torch.stack(tensors).abs().max()


@pytest.mark.parametrize("world", [2, 3, 8, 24])
def test_one_message_per_step_in_any_world(world: int) -> None:
    tape: dict = {}
    exchange(tap(Gossip(), tape), [noise(world, 50)])
    sent = [line for line in tape[0, 0] if line.startswith("start")]
    assert len(sent) == world
    assert all(line.startswith("start permute(bfloat16[50], to=") for line in sent)


# -- any topology -----------------------------------------------------------------------------------------------------

EVERY_TOPOLOGY = [*FAMILY, rotated(Dissemination()), rotated(Ring(), seed=3)]


@pytest.mark.parametrize("topology", EVERY_TOPOLOGY, ids=repr)
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("world", [2, 3, 4, 7, 16, 24])
def test_the_mean_stays_on_every_topology(topology: Topology, wire: str, world: int) -> None:
    if isinstance(topology, Hypercube) and world & (world - 1):
        pytest.skip("a hypercube has 2^k corners")
    tensors = noise(world, 40)
    before, after = torch.stack(tensors), torch.stack(gossip(Gossip(wire=wire, topology=topology), tensors, 12))
    assert (after.double().mean(0) - before.double().mean(0)).abs().max() < 1e-6
    assert (after - after.mean(0)).norm() < 0.9 * (before - before.mean(0)).norm()


@pytest.mark.parametrize("topology", EVERY_TOPOLOGY, ids=repr)
def test_a_step_is_the_mixing_matrix(topology: Topology) -> None:
    tensors = noise(8, 30, torch.float64)
    outcomes = exchange(Gossip(wire="fp32", topology=topology), [tensors] * 5)
    for step in range(5):
        matrix = torch.tensor(mixing_matrix(topology.at(step, 8)), dtype=torch.float64)
        expected = matrix @ torch.stack(tensors) - torch.stack(tensors)
        assert torch.allclose(stacked(outcomes, step), expected, rtol=0, atol=1e-14)


def test_local_steps_pass_between_two_exchanges() -> None:
    algorithm = Gossip(every=3)
    assert [step for step in range(10) if algorithm.cadence.due(step)] == [0, 3, 6, 9]
    met = [algorithm.topology.at(step // 3, 8) for step in (0, 3, 6, 9)]
    assert met == [Dissemination().at(number, 8) for number in range(4)], "no partner of the cycle is left out"


def test_what_travels_repeats_itself_with_the_period() -> None:
    assert Gossip().cadence.period == 1
    assert Gossip(every=3).cadence.period == 3
    assert GossipPGA(every=2, period=5).cadence.period == 10
    assert after(3, Gossip(every=4), before=Gossip(every=6)).cadence.period == 12
    assert by_size(3, small=Gossip(every=2), large=Gossip(every=3)).cadence.period == 6


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_the_global_average_is_exact(world: int) -> None:
    tensors = noise(world, 60)
    mean = torch.stack(tensors).mean(0)
    outcomes = exchange(GossipPGA(period=3), [tensors] * 4)
    for step in (0, 3):
        assert torch.allclose(stacked(outcomes, step) + torch.stack(tensors), mean.expand(world, -1), atol=1e-5)
    if world > 2:
        assert not torch.allclose(stacked(outcomes, 1) + torch.stack(tensors), mean.expand(world, -1), atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("world", [4, 16, 64])
def test_the_global_average_is_computed_in_full_precision(dtype: torch.dtype, world: int) -> None:
    """Summed in 16 bits its rounding would be as large as what workers differ by."""
    tensors = [(1 + 0.05 * tensor).to(dtype) for tensor in noise(world, 40)]
    before = torch.stack(tensors).float()
    after = before + stacked(exchange(GossipPGA(period=1), [tensors]), 0).float()
    eps = torch.finfo(dtype).eps
    assert (after - before.mean(0)).abs().max() < eps * (before - before.mean(0)).abs().max() + 1e-3 * eps


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Gossip(topology="ring"), r"topology must be one of gossamer.comm.topology, such as Ring\(\)"),
        (lambda: Gossip(every=0), "every must be a number of steps, at least 1; got 0"),
        (lambda: GossipPGA(period=1.5), "period must be a number of steps"),
        (lambda: Gossip(topology=Hypercube()).check(6), "Gossip: a hypercube has 2\\^k corners; 6 ranks"),
        (
            lambda: DecentralizedSGD(topology=Halves()).check(4),
            "does not connect 4 ranks: what rank 0 learns",
        ),
        (lambda: after(5, Gossip(topology=Hypercube())).check(3), "a hypercube has"),
        (lambda: by_size(9, small=Gossip(), large=Gossip(topology=Hypercube())).check(3), "a hypercube has"),
    ],
)
def test_bad_topologies(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


def test_a_world_that_a_topology_cannot_serve_is_refused_at_the_start() -> None:
    def body(rank: int) -> None:
        model = torch.nn.Linear(2, 2)
        gossamer.replicate(model, torch.optim.SGD(model.parameters()), Gossip(topology=Hypercube()))

    with pytest.raises(ConfigurationError, match="6 ranks are not a power of two"):
        gossamer.loopback(body, 6)


class Halves(Topology):
    """Pairs that never meet anybody else."""

    def at(self, step: int, world: int) -> Exchange:
        return Exchange(world, (Permutation(tuple(rank ^ 1 for rank in range(world))),))

    def cycle(self, world: int) -> int:
        return 1
