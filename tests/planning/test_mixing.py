"""The effective number of neighbours of averages of weights: between one and all, and as theory says at its ends."""

import numpy as np
import pytest

from gossamer import AllReduce, ConfigurationError, Gossip, GossipPGA, Hierarchical, LocalSGD, PushSum, in_parts
from gossamer.algorithms import Algorithm
from gossamer.comm.digraph import RandomPush
from gossamer.comm.topology import Complete, Ring
from gossamer.planning.mixing import mixing, neighbours

WEIGHTS: tuple[Algorithm, ...] = (
    Gossip(),
    Gossip(every=3),
    Gossip(topology=Ring()),
    GossipPGA(period=4),
    in_parts(4, Gossip()),
    LocalSGD(every=4),
    Hierarchical(Gossip(), ranks_per_node=2),
)


@pytest.mark.parametrize("algorithm", WEIGHTS, ids=repr)
def test_every_step_keeps_the_mean(algorithm: Algorithm) -> None:
    for _, matrix in zip(range(24), mixing(algorithm, 8), strict=False):
        np.testing.assert_allclose(matrix.sum(0), 1)
        np.testing.assert_allclose(matrix.sum(1), 1)


@pytest.mark.parametrize("algorithm", WEIGHTS, ids=repr)
def test_it_lies_between_one_and_all(algorithm: Algorithm) -> None:
    assert 1 < neighbours(algorithm, 8) <= 8.01


def test_exact_averages_count_all() -> None:
    assert neighbours(AllReduce(), 8) == 8
    assert neighbours(Gossip(topology=Complete()), 8) == pytest.approx(8, rel=1e-3)
    assert neighbours(LocalSGD(every=1), 8) == pytest.approx(8, rel=1e-3)


def test_less_mixing_counts_fewer() -> None:
    assert neighbours(Gossip(), 16) > neighbours(Gossip(every=4), 16) > neighbours(Gossip(every=16), 16)
    assert neighbours(Gossip(), 16) > neighbours(in_parts(8, Gossip()), 16)
    assert neighbours(Hierarchical(Gossip(), ranks_per_node=4), 16) > neighbours(Gossip(), 16)


def test_local_steps_have_the_closed_form() -> None:
    """Of H steps between exact averages among p, at step j the variance is Σ_{i<j} γ^i alone, plus γ^j·v/p from before."""
    p, period, decay = 8, 4, 0.9
    kept = decay**period
    at_average = sum(decay**i for i in range(period)) / p / (1 - kept)  # the fixed point just after an average, of v
    variances = [at_average] + [sum(decay**i for i in range(j)) + decay**j * at_average for j in range(1, period)]
    expected = 1 / (1 - decay) / (sum(variances) / period)
    assert neighbours(LocalSGD(every=period), p, decay=decay) == pytest.approx(expected, rel=0.02)


def test_what_is_not_known_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="directed"):
        neighbours(PushSum(topology=RandomPush()), 8)
    with pytest.raises(ConfigurationError, match="decay"):
        neighbours(Gossip(), 8, decay=1.0)
