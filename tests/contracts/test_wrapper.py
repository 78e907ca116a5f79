"""A wrapper in five lines that passes everything through passes the battery, for every algorithm."""

import pytest
import torch

from gossamer.algorithms import Algorithm

from . import laws
from .cases import PassThrough, algorithms

ALONE = algorithms()


def battery(algorithm: Algorithm, world: int) -> None:
    """The laws of one exchange."""
    laws.meta_tensors_suffice(algorithm, world)
    laws.nothing_stays_nothing(algorithm, world)
    laws.the_same_again_gives_the_same_bits(algorithm, world)
    if algorithm.subject == "gradients":
        laws.all_ranks_hold_the_same_bits(algorithm, world, torch.float32)
        laws.non_finite_values_reach_all_ranks_and_no_state(algorithm, world, float("nan"))
        laws.among_one_nothing_is_kept_back(algorithm, torch.float32)


@pytest.mark.parametrize("algorithm", ALONE, ids=repr)
def test_it_passes_the_battery(algorithm: Algorithm) -> None:
    around = PassThrough(inner=algorithm)
    assert (around.traits, around.cadence) == (algorithm.traits, algorithm.cadence)
    assert around.bucket_bytes == algorithm.bucket_bytes
    battery(around, 4)
