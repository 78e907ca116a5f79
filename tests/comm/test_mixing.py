"""How fast a topology mixes: known numbers, and a topology that does not connect."""

import math
from dataclasses import dataclass
from itertools import islice

import numpy as np
import pytest

from gossamer.comm.mixing import (
    check_connected,
    disagreement,
    messages,
    product,
    slowest_spread,
    spectral_gap,
    spread,
    typical_disagreement,
)
from gossamer.comm.topology import (
    FAMILY,
    Complete,
    Dissemination,
    Exchange,
    Hypercube,
    OnePeerExponential,
    Permutation,
    RandomMatching,
    Ring,
    ShiftOne,
    Topology,
    exchange,
    rotated,
)


@dataclass(frozen=True)
class TwoIslands(Topology):
    """Neighbouring pairs only, always the same."""

    def at(self, step: int, world: int) -> Exchange:
        return exchange(
            world, [Permutation(tuple(min(rank ^ 1, world - 1) if rank | 1 < world else rank for rank in range(world)))]
        )


@pytest.mark.parametrize("world", [2, 3, 4, 7, 16])
def test_the_gap_of_a_ring_is_the_known_one(world: int) -> None:
    """Both neighbours: the second eigenvalue is (1 + 2 cos(2π/p))/3; directed: its size is |1 + e^(2πi/p)|/2."""
    angle = 2 * math.pi / world
    if world > 2:
        assert spectral_gap(Ring(), world) == pytest.approx(1 - abs(1 + 2 * math.cos(angle)) / 3, abs=1e-12)
    assert spectral_gap(Ring(directed=True), world) == pytest.approx(1 - abs(math.cos(angle / 2)), abs=1e-12)


@pytest.mark.parametrize("world", [1, 2, 8, 16])
@pytest.mark.parametrize("topology", [Dissemination(), OnePeerExponential(), Hypercube(), Complete()], ids=repr)
def test_a_gap_of_one_is_exact_consensus(topology: Topology, world: int) -> None:
    assert spectral_gap(topology, world) == pytest.approx(1.0, abs=1e-12)


def test_who_does_not_connect_has_no_gap() -> None:
    assert spectral_gap(TwoIslands(), 4) == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("world", range(1, 25))
def test_all_of_the_family_connect(world: int) -> None:
    for topology in FAMILY:
        if not (isinstance(topology, Hypercube) and world & (world - 1)):
            check_connected(topology, world)
            check_connected(rotated(topology, 1), world)
            assert isinstance(topology, RandomMatching) or spectral_gap(topology, world) > 1e-3


@pytest.mark.parametrize(
    ("world", "said"), [(4, "what rank 0 learns never reaches ranks 2, 3$"), (3, "what rank 0 learns never reaches rank 2$")]
)
def test_who_cannot_be_reached_is_named(world: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        check_connected(TwoIslands(), world)
    with pytest.raises(ValueError, match="does not connect"):
        slowest_spread(TwoIslands(), world)
    check_connected(TwoIslands(), 2)


def test_rotation_connects_what_was_not() -> None:
    check_connected(rotated(TwoIslands()), 6)


def test_disagreement_is_what_values_do() -> None:
    """The worst values keep that share of their distance; random ones the typical share."""
    source = np.random.default_rng(0)
    for topology in (Ring(), ShiftOne(), rotated(Dissemination(), 2)):
        total = product(topology, 6, 3)
        values = source.standard_normal((6, 20000))
        values -= values.mean(0)
        after = total @ values
        shares = np.linalg.norm(after, axis=0) / np.linalg.norm(values, axis=0)
        assert shares.max() <= disagreement(topology, 6, 3) + 1e-9
        assert shares.max() >= 0.9 * disagreement(topology, 6, 3)
        size = np.linalg.norm(after) / np.linalg.norm(values)
        assert size == pytest.approx(typical_disagreement(topology, 6, 3), rel=0.02)


def test_counting_steps_and_messages() -> None:
    assert list(islice(spread(Ring(directed=True), 4), 2)) == [
        [0b0001, 0b0010, 0b0100, 0b1000],
        [0b0011, 0b0110, 0b1100, 0b1001],
    ]
    assert [slowest_spread(topology, 16) for topology in (Complete(), Dissemination(), Ring(), Ring(directed=True))] == [
        1,
        4,
        8,
        15,
    ]
    assert slowest_spread(Dissemination(), 1) == 0
    assert [messages(topology, 9) for topology in (Complete(), Dissemination(), Ring())] == [8, 1, 2]
    assert messages(ShiftOne(), 9) == pytest.approx(8 / 9)
