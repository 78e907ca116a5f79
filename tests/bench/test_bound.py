"""Bounds: from compute, wire and when gradients come."""

import pytest

from gossamer.bench.bound import Ready, joined, measure_ready, overlapped, wire
from gossamer.bench.catalogue import find_workload


def test_side_by_side_the_longer_one_counts():
    assert overlapped(2.0, 1.0) == 2.0
    assert overlapped(1.0, 3.0) == 3.0


def test_the_wire_of_the_rank_that_takes_longest_counts():
    assert wire([1e6, 1e6], [8e6, 2e6]) == 4.0
    assert wire([9e6, 1e6], [8e6, 2e6]) == 9.0


@pytest.mark.parametrize(
    ("seconds", "bound"),
    [
        (0.0, 10.0),  # nothing to send: the compute
        (4.0, 10.0),  # all of it travels while the step goes on
        (8.0, 12.0),  # what comes at 4 has to wait for nothing, and everything follows it: 4 + 8
        (40.0, 44.0),
    ],
)
def test_a_join_begins_with_the_first_gradient_and_ends_with_the_wire_of_the_last(seconds, bound):
    assert joined(10.0, seconds, Ready((4.0, 8.0), (0.5, 0.5), 10.0)) == bound


def test_a_large_gradient_that_comes_last_hides_nothing():
    assert joined(10.0, 10.0, Ready((4.0, 9.0), (0.1, 0.9), 10.0)) == pytest.approx(18.0)


def test_readiness_follows_the_length_of_the_step():
    assert Ready((4.0, 8.0), (0.5, 0.5), 10.0).within(5.0) == Ready((2.0, 4.0), (0.5, 0.5), 5.0)


def test_gradients_of_an_emulated_model_are_ready_in_its_backward():
    ready = measure_ready(find_workload("Convnet(0.2)"), repeats=3)
    assert len(ready.seconds) == 8
    assert list(ready.seconds) == sorted(ready.seconds)
    assert 0.2 / 3 < ready.seconds[0] < ready.seconds[-1] < 0.5
    assert sum(ready.shares) == pytest.approx(1.0)
    assert max(ready.shares) > 0.9  # one layer has nearly all parameters
    assert ready.shares[0] < 0.01
    assert ready.seconds[-1] <= ready.step
