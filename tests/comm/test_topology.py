"""Laws of the patterns, for every world size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.comm.topology import Permutation, dissemination, mixing_matrix, rounds, shift

permutations = st.integers(1, 24).flatmap(lambda world: st.permutations(range(world))).map(lambda to: Permutation(tuple(to)))


@given(permutations)
def test_source_undoes_destination(permutation: Permutation) -> None:
    for rank in range(permutation.world):
        assert permutation.source(permutation.destination(rank)) == rank


@given(permutations)
def test_averaging_along_any_permutation_is_doubly_stochastic(permutation: Permutation) -> None:
    matrix = torch.tensor(mixing_matrix(permutation))
    ones = torch.ones(permutation.world)
    assert torch.equal(matrix.sum(0), ones)
    assert torch.equal(matrix.sum(1), ones)


@pytest.mark.parametrize("to", [(0, 0), (1,), (0, 2), (-1, 0), (1, 2, 3)])
def test_what_is_no_permutation_is_refused(to: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="not a permutation"):
        Permutation(to)


@settings(deadline=None)
@given(st.integers(-50, 50), st.integers(1, 40))
def test_shift_sends_below(distance: int, world: int) -> None:
    assert all(shift(distance, world).destination(rank) == (rank - distance) % world for rank in range(world))


@given(st.integers(0, 10**6), st.integers(2, 200))
def test_nobody_is_their_own_partner(step: int, world: int) -> None:
    partners = dissemination(step, world)
    assert all(partners.destination(rank) != rank for rank in range(world))
    assert partners == dissemination(step + rounds(world), world), "the cycle is ⌈log2 p⌉ long"


def test_a_world_of_one_sends_to_itself() -> None:
    assert dissemination(3, 1).to == (0,)


def all_know_all(world: int, begin: int, steps: int) -> bool:
    """Whether every rank's update has reached every other one after so many steps."""
    known = [{rank} for rank in range(world)]
    for step in range(begin, begin + steps):
        partners = dissemination(step, world)
        known = [known[rank] | known[partners.source(rank)] for rank in range(world)]
    return all(len(updates) == world for updates in known)


@pytest.mark.parametrize("world", range(2, 65))
def test_an_update_reaches_everyone(world: int) -> None:
    """In one whole cycle from its start; from any step within 2⌈log2 p⌉ − 1 steps."""
    cycle = rounds(world)
    assert all_know_all(world, 0, cycle)
    assert all(all_know_all(world, begin, 2 * cycle - 1) for begin in range(cycle))


@pytest.mark.parametrize("world", [3, 5, 8, 13, 64])
def test_nothing_is_faster_than_doubling(world: int) -> None:
    assert not all_know_all(world, 0, rounds(world) - 1)


@pytest.mark.parametrize("exponent", range(7))
def test_one_cycle_gives_the_exact_mean_for_powers_of_two(exponent: int) -> None:
    world = 2**exponent
    product = torch.eye(world, dtype=torch.float64)
    for step in range(5, 5 + exponent):
        product = torch.tensor(mixing_matrix(dissemination(step, world)), dtype=torch.float64) @ product
    assert torch.equal(product, torch.full((world, world), 1 / world, dtype=torch.float64))
