"""Bounds: from compute, wire and when gradients come."""

import pytest
import torch

from gossamer.bench.bound import Ready, joined, layered, measure_ready, overlapped, wire
from gossamer.bench.catalogue import find_workload
from gossamer.bench.workload import Workload, usual_loss, usual_optimizer


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
    assert joined(10.0, seconds, Ready((4.0, 8.0), (0.5, 0.5), 10.0, (2.0, 1.0))) == bound


def test_a_large_gradient_that_comes_last_hides_nothing():
    assert joined(10.0, 10.0, Ready((4.0, 9.0), (0.1, 0.9), 10.0, (2.0, 1.0))) == pytest.approx(18.0)


# Three layers of 1, 1 and 1 second forward, 2, 2 and 2 backward; gradients come at 5, 7 and 9, layers are used at 2, 1 and 0.
THREE = ((5.0, 7.0, 9.0), 9.0, (2.0, 1.0, 0.0))


@pytest.mark.parametrize(
    ("shares", "seconds", "bound"),
    [
        ((0.1, 0.8, 0.1), 0.0, 9.0),  # nothing to send: the compute
        (
            (0.0, 0.9, 0.1),
            3.0,
            9.3,
        ),  # the first layer's gradient comes last, and it is used first: its 0.1 of 3 is hidden by nothing
        ((0.1, 0.8, 0.1), 8.0, 13.2),  # 6 for the layers in the middle and behind it, and 0.9 of 8 for it and the first
        ((0.1, 0.8, 0.1), 90.0, 93.0),  # the last layer's own 3 seconds follow the whole wire
        ((0.0, 0.0, 1.0), 8.0, 17.0),  # the first layer is needed first: nothing overlaps
        ((1.0, 0.0, 0.0), 8.0, 11.0),  # the last one: only what it computes itself does not
    ],
)
def test_a_layer_does_not_compute_while_it_waits_for_its_own_exchange(shares, seconds, bound):
    came, step, used = THREE
    assert layered(9.0, seconds, Ready(came, shares, step, used)) == pytest.approx(bound)


def test_layers_in_front_travel_in_the_window_of_the_one_behind_them():
    """Both in front are needed before the last is: their exchanges share what is left of the step."""
    came, step, used = THREE
    both = layered(9.0, 8.0, Ready(came, (0.0, 0.5, 0.5), step, used))
    assert both == pytest.approx(max(9.0 + 4.0, 6.0 + 8.0))


def test_no_layer_makes_the_bound_lower_than_that_with_everything_overlapped_or_higher_than_a_join():
    came, step, used = THREE
    for shares in ((0.2, 0.3, 0.5), (0.9, 0.05, 0.05), (0.0, 1.0, 0.0)):
        ready = Ready(came, shares, step, used)
        for seconds in (0.0, 1.0, 4.0, 20.0):
            assert overlapped(9.0, seconds) <= layered(9.0, seconds, ready) <= joined(9.0, seconds, ready) + 1e-9


def test_readiness_follows_the_length_of_the_step():
    assert Ready((4.0, 8.0), (0.5, 0.5), 10.0, (3.0, 1.0)).within(5.0) == Ready((2.0, 4.0), (0.5, 0.5), 5.0, (1.5, 0.5))


@pytest.mark.alone
def test_gradients_of_an_emulated_model_are_ready_in_its_backward():
    ready = measure_ready(find_workload("Convnet(0.2)"), repeats=3, forward=True)
    assert len(ready.seconds) == 8
    assert list(ready.seconds) == sorted(ready.seconds)
    assert 0.2 / 3 < ready.seconds[0] < ready.seconds[-1] < 0.5
    assert sum(ready.shares) == pytest.approx(1.0)
    assert max(ready.shares) > 0.9  # one layer has nearly all parameters
    assert ready.shares[0] < 0.01
    assert ready.seconds[-1] <= ready.step
    large = ready.shares.index(max(ready.shares))
    # Forward and backward of that layer are 0.3 of the multiplications, and what is behind it nearly none.
    assert 0.25 * 0.2 < ready.seconds[large] - ready.used[large] < 0.5 * 0.2
    assert ready.used[-1] < ready.used[large] < ready.used[0] < ready.seconds[0]


def not_noticed(build_model, forward=True):
    """For each gradient of a model from 4 to 2 values, whether its parameter counts as used only when it is there itself."""

    def batch(generator):
        return torch.randn(3, 4, generator=generator), torch.randn(3, 2, generator=generator)

    ready = measure_ready(Workload("small", build_model, usual_optimizer, batch, usual_loss), repeats=3, forward=forward)
    return sorted(came == used for came, used in zip(ready.seconds, ready.used, strict=True))


class Borrowing(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.held, self.called = torch.nn.Linear(4, 4), torch.nn.Linear(4, 2)

    def forward(self, inputs):
        return self.called(torch.nn.functional.linear(inputs, self.held.weight, self.held.bias))


def test_a_parameter_that_another_module_takes_is_used_at_the_latest_when_its_gradient_is_there():
    assert not_noticed(Borrowing) == [False, False, True, True]


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is:FutureWarning")  # of torch 2.14 on
def test_what_is_scripted_takes_no_hooks_and_is_used_at_the_latest_when_its_gradient_is_there():
    def partly_scripted():
        return torch.nn.Sequential(torch.jit.script(torch.nn.Linear(4, 4)), torch.nn.Linear(4, 2))

    assert not_noticed(partly_scripted) == [False, False, True, True]


def test_the_forward_pass_is_watched_only_if_asked_for():
    assert not_noticed(Borrowing, forward=False) == [True] * 4
