"""Laws of the whole family of topologies, for every world size."""

import itertools
import math
import subprocess
import sys

import numpy as np
import pytest

from gossamer.comm.topology import (
    FAMILY,
    Complete,
    Dissemination,
    Hypercube,
    OnePeerExponential,
    RandomMatching,
    Ring,
    ShiftOne,
    Topology,
    dissemination,
    exchange_at,
    mixing_matrix,
    rotated,
    rounds,
    shuffled,
)

EVERY = [*FAMILY, *(rotated(topology, seed=3) for topology in FAMILY)]
DOUBLING = [Dissemination(), OnePeerExponential(), Hypercube()]
PAIRED = (RandomMatching(), ShiftOne(), Hypercube())
EXPECTED = ((7, 3, 2, 4, 6, 0, 5, 1), (1, 2, 4, 0, 6, 7, 3, 5))
worlds = pytest.mark.parametrize("world", range(2, 25))


def serves(topology: Topology, world: int) -> bool:
    return "Hypercube" not in repr(topology) or world & (world - 1) == 0


def matrix(topology: Topology, step: int, world: int) -> np.ndarray:
    return np.array(mixing_matrix(topology.at(step, world)))


def all_know_all(topology: Topology, world: int, begin: int, steps: int) -> bool:
    """Whether every rank's update has reached every other one after so many steps; from the messages alone."""
    known = [{rank} for rank in range(world)]
    for step in range(begin, begin + steps):
        met = topology.at(step, world)
        known = [known[rank].union(*(known[source] for source in met.sources(rank))) for rank in range(world)]
    return all(len(each) == world for each in known)


@worlds
def test_every_step_is_doubly_stochastic(world: int) -> None:
    for topology in (each for each in EVERY if serves(each, world)):
        for step in range(2 * world):
            mixing = matrix(topology, step, world)
            assert (mixing >= 0).all()
            np.testing.assert_allclose(mixing.sum(0), 1, atol=1e-12, err_msg=f"{topology} at {step}")
            np.testing.assert_allclose(mixing.sum(1), 1, atol=1e-12, err_msg=f"{topology} at {step}")


@worlds
def test_sends_and_receives_match(world: int) -> None:
    """Who sends is received from, nobody sends to themselves, and the weights are for those who are received from."""
    for topology in (each for each in EVERY if serves(each, world)):
        for step in range(world):
            met = topology.at(step, world)
            sent = {(rank, to) for rank in range(world) for to in met.destinations(rank)}
            received = {(source, rank) for rank in range(world) for source in met.sources(rank)}
            assert sent == received
            assert all(one != other for one, other in sent)
            assert all(set(met.weights(rank)) == {rank, *met.sources(rank)} for rank in range(world))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("topology", FAMILY, ids=repr)
def test_it_begins_anew_after_its_cycle(topology: Topology, world: int) -> None:
    if serves(topology, world) and not isinstance(topology, RandomMatching):
        cycle = topology.cycle(world)
        assert all(topology.at(step, world) == topology.at(step + cycle, world) for step in range(2 * cycle))


@pytest.mark.parametrize("world", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("topology", EVERY, ids=repr)
def test_an_exchange_is_that_of_its_step_also_where_a_cycle_was_worked_out_before(topology: Topology, world: int) -> None:
    if serves(topology, world):
        steps = range(3 * topology.cycle(world) + 1)
        assert all(exchange_at(topology, step, world) == topology.at(step, world) for step in steps)


@pytest.mark.parametrize("topology", EVERY, ids=repr)
def test_alone_nothing_is_sent(topology: Topology) -> None:
    assert topology.at(5, 1).permutations == ()
    assert topology.at(5, 1).weights(0) == {0: 1.0}


@pytest.mark.parametrize("topology", DOUBLING + [rotated(each, 5) for each in DOUBLING], ids=repr)
@pytest.mark.parametrize("exponent", [1, 2, 3, 4, 5])
def test_exact_consensus_after_k_rounds_for_powers_of_two(topology: Topology, exponent: int) -> None:
    """From the begin of any cycle; unrotated, from any step."""
    world, product = 2**exponent, np.eye(2**exponent)
    for step in range(3 * exponent, 4 * exponent):
        product = matrix(topology, step, world) @ product
    assert (product == 1 / world).all()


@worlds
@pytest.mark.parametrize("rotate", [False, True])
def test_an_update_reaches_everyone_in_time(world: int, rotate: bool) -> None:
    """Within one whole cycle from its start; from any step within 2⌈log2 p⌉ − 1."""
    cycle = rounds(world)
    for plain in (each for each in DOUBLING if serves(each, world)):
        topology = rotated(plain, seed=world) if rotate else plain
        for start in range(0, 4 * cycle, cycle):
            assert all_know_all(topology, world, start, cycle)
            assert all(all_know_all(topology, world, start + late, 2 * cycle - 1) for late in range(cycle))


def test_the_counts_of_rounds_are_no_more_than_is_needed() -> None:
    """Else the law above would hold for a slower pattern as well."""
    assert not any(all_know_all(topology, 16, 0, 3) for topology in DOUBLING)
    assert not any(all_know_all(rotated(Dissemination(), seed), 16, 3, 2) for seed in range(8))


@worlds
def test_under_rotation_each_pair_meets_equally_often(world: int) -> None:
    """Per renumbering, a rank meets k = ⌈log2 p⌉ different ones of p − 1: counts are binomial with q = k/(p − 1).

    All p(p − 1) ordered pairs within 5.5 standard deviations: that is 4600 pairs for all p together, so by chance alone less
    than one seed in a thousand fails somewhere. For 2 and 3 ranks q is 1: exactly equally often.
    """
    cycle, epochs = rounds(world), 1500
    counts, ranks = np.zeros((world, world)), np.arange(world)
    topology = rotated(Dissemination(), seed=11)
    for step in range(epochs * cycle):
        counts[ranks, topology.at(step, world).permutations[0].to] += 1
    q = cycle / (world - 1)
    off = counts[~np.eye(world, dtype=bool)]
    assert counts.trace() == 0
    assert abs(off - epochs * q).max() <= 5.5 * math.sqrt(epochs * q * (1 - q)) + 1e-9
    plain = {dissemination(step, world).destination(0) for step in range(cycle)}
    assert len(plain) < world - 1 or world <= 3, "without rotation some never meet"


@pytest.mark.parametrize("world", [2, 3, 7, 8])
@pytest.mark.parametrize("topology", PAIRED, ids=repr)
def test_pairs_exchange_and_one_of_an_odd_number_has_a_bye(topology: Topology, world: int) -> None:
    for step in range(12) if serves(topology, world) else []:
        met = topology.at(step, world)
        assert all(met.destinations(rank) == met.sources(rank) for rank in range(world))
        assert [len(met.sources(rank)) for rank in range(world)].count(0) == world % 2


@pytest.mark.parametrize("world", [6, 9])
def test_shift_one_pairs_the_halves_in_turn(world: int) -> None:
    """Every lower rank meets every upper one once per cycle."""
    half = (world + 1) // 2
    cycle = [ShiftOne().at(step, world) for step in range(ShiftOne().cycle(world))]
    for low in range(half):
        met = list(itertools.chain.from_iterable(step.sources(low) for step in cycle))
        assert sorted(met) == list(range(half, world))


def test_random_pairs_are_spread_evenly() -> None:
    """2000 steps among 6 ranks: each of the 15 pairs meets in a fifth of them, within 5 standard deviations."""
    counts = np.zeros((6, 6))
    for step in range(2000):
        for rank in range(6):
            counts[rank, RandomMatching(4).at(step, 6).sources(rank)[0]] += 1
    off = counts[~np.eye(6, dtype=bool)]
    assert abs(off - 400).max() <= 5 * math.sqrt(2000 * 0.2 * 0.8)


def test_neighbours_and_everyone() -> None:
    assert Ring().at(0, 5).sources(0) == (1, 4)
    assert Ring().at(0, 5).weights(0) == pytest.approx({0: 1 / 3, 1: 1 / 3, 4: 1 / 3})
    assert Ring(directed=True).at(0, 5).destinations(0) == (4,)
    assert Ring().at(0, 2).weights(0) == {0: 0.5, 1: 0.5}, "the neighbour on both sides is one rank"
    np.testing.assert_allclose(matrix(Complete(), 0, 7), 1 / 7, atol=1e-15)
    assert OnePeerExponential().at(1, 8).destinations(0) == (2,)
    assert Dissemination().at(1, 8).destinations(0) == (6,)
    assert Hypercube().at(1, 8).destinations(5) == (7,)


@pytest.mark.parametrize("world", [3, 6, 12])
@pytest.mark.parametrize("topology", [Hypercube(), rotated(Hypercube())], ids=repr)
def test_a_hypercube_needs_a_power_of_two(topology: Topology, world: int) -> None:
    with pytest.raises(ValueError, match=rf"{world} ranks are not a power of two"):
        topology.at(0, world)


def test_permutations_are_drawn_the_same_everywhere() -> None:
    """Fixed values, and another hash seed of Python: ranks on different machines must agree."""
    assert shuffled(8, 0, 0) == EXPECTED[0]
    assert shuffled(8, 1, 5) == EXPECTED[1]
    code = "from gossamer.comm.topology import shuffled; print(shuffled(8, 0, 0), shuffled(8, 1, 5))"
    said = subprocess.check_output([sys.executable, "-c", code], env={"PYTHONHASHSEED": "7", "PYTHONPATH": ":".join(sys.path)})
    assert said.decode().strip() == f"{EXPECTED[0]} {EXPECTED[1]}"


def test_permutations_differ_by_seed_and_number() -> None:
    drawn = {shuffled(12, seed, number) for seed in range(30) for number in range(30)}
    assert len(drawn) == 900
