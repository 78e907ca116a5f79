"""One battery over every registered algorithm: what holds for a single exchange, whatever the method."""

import pytest
import torch

from gossamer.algorithms import Algorithm, Hierarchical

from . import laws
from .cases import EVERY_WORLD, SHAPES, WORLDS, algorithms

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

everyone = pytest.mark.parametrize("algorithm", algorithms(), ids=repr)
of_gradients = pytest.mark.parametrize("algorithm", algorithms("gradients"), ids=repr)
of_weights = pytest.mark.parametrize("algorithm", algorithms("weights"), ids=repr)
keep_the_mean = pytest.mark.parametrize("algorithm", [a for a in algorithms("weights") if not a.traits.moves_mean], ids=repr)
worlds = pytest.mark.parametrize("world", WORLDS)


@everyone
@worlds
def test_result_is_like_the_bucket(algorithm: Algorithm, world: int) -> None:
    for dtype in DTYPES:
        for shapes in SHAPES.values():
            laws.result_is_like_the_bucket(algorithm, world, shapes, dtype)


@everyone
@worlds
def test_meta_tensors_suffice(algorithm: Algorithm, world: int) -> None:
    laws.meta_tensors_suffice(algorithm, world)


@everyone
@worlds
def test_nothing_stays_nothing(algorithm: Algorithm, world: int) -> None:
    laws.nothing_stays_nothing(algorithm, world)


@everyone
@worlds
def test_a_huge_value_stays_finite(algorithm: Algorithm, world: int) -> None:
    laws.a_huge_value_stays_finite(algorithm, world)


@pytest.mark.parametrize("algorithm", [a for a in algorithms() if not isinstance(a, Hierarchical)], ids=repr)
@worlds
def test_an_abandoned_exchange_loses_nothing(algorithm: Algorithm, world: int) -> None:
    laws.an_abandoned_exchange_loses_nothing(algorithm, world)


@everyone
@worlds
def test_the_same_again_gives_the_same_bits(algorithm: Algorithm, world: int) -> None:
    laws.the_same_again_gives_the_same_bits(algorithm, world)


@of_gradients
@worlds
def test_all_ranks_hold_the_same_bits(algorithm: Algorithm, world: int) -> None:
    for dtype in DTYPES:
        laws.all_ranks_hold_the_same_bits(algorithm, world, dtype)


@of_gradients
@worlds
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_values_reach_all_ranks_and_no_state(algorithm: Algorithm, world: int, poison: float) -> None:
    laws.non_finite_values_reach_all_ranks_and_no_state(algorithm, world, poison)


@pytest.mark.parametrize("algorithm", algorithms("gradients", exact=True), ids=repr)
@worlds
def test_exact_algorithms_give_the_mean(algorithm: Algorithm, world: int) -> None:
    for dtype in DTYPES:
        laws.the_result_is_the_mean(algorithm, world, dtype)


@of_gradients
@pytest.mark.parametrize("dtype", DTYPES)
def test_among_one_nothing_is_kept_back(algorithm: Algorithm, dtype: torch.dtype) -> None:
    laws.among_one_nothing_is_kept_back(algorithm, dtype)


@keep_the_mean
@pytest.mark.parametrize("world", EVERY_WORLD)
def test_the_mean_of_the_weights_is_kept(algorithm: Algorithm, world: int) -> None:
    laws.the_mean_of_the_weights_is_kept(algorithm, world)


@of_weights
@worlds
def test_equal_weights_are_left_alone(algorithm: Algorithm, world: int) -> None:
    for dtype in DTYPES:
        laws.equal_weights_are_left_alone(algorithm, world, dtype)


@of_weights
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_weights_come_closer(algorithm: Algorithm, world: int) -> None:
    laws.weights_come_closer(algorithm, world)


@of_weights
@pytest.mark.parametrize("world", [2, 3, 5, 8])
def test_a_non_finite_weight_is_seen_by_others(algorithm: Algorithm, world: int) -> None:
    laws.a_non_finite_weight_is_seen_by_others(algorithm, world)
