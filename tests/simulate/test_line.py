"""A line that transfers share: closed forms, laws, and beside a simulation in small steps."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gossamer.comm.operations import Traffic
from gossamer.simulate.clock import Clock
from gossamer.simulate.line import SharedLine
from gossamer.simulate.profile import Link, Transport

RATE = 8e6  # a million bytes per second


def ends(transfers: list[tuple[float, int]], latency: float = 0.0, rounds: int = 1, **transport: float) -> list[float]:
    """When each of some (beginning in seconds, bytes) ends."""
    clock, found = Clock(), [-1.0] * len(transfers)
    line = SharedLine(clock, Link(bandwidth=RATE, latency=latency, transport=Transport(**transport)))

    def begin(number: int) -> None:
        done = line.send(Traffic(transfers[number][1], rounds))
        done.then(lambda: found.__setitem__(number, clock.now))

    for number, (moment, _) in enumerate(transfers):
        clock.at(moment, lambda number=number: begin(number))
    clock.run_until(lambda: min(found) >= 0)
    return found


def test_alone_a_transfer_has_the_whole_rate() -> None:
    assert ends([(0.5, 1_000_000)]) == [pytest.approx(1.5)]


def test_two_transfers_have_half_of_it_each() -> None:
    assert ends([(0.0, 1_000_000), (0.0, 1_000_000)]) == pytest.approx([2.0, 2.0])


def test_a_short_transfer_passes_a_long_one() -> None:
    """It shares from its beginning at 1 s to its end; the long one then has all again."""
    assert ends([(0.0, 2_000_000), (1.0, 100_000)]) == pytest.approx([2.1, 1.2])


def test_every_round_adds_a_latency_in_which_others_have_the_line() -> None:
    assert ends([(0.0, 1_000_000), (1.0, 1_000_000)], latency=0.1, rounds=3) == pytest.approx([1.3, 2.3])


def test_a_window_bounds_each_transfer_and_not_the_link() -> None:
    """A fourth of the link in 0.1 s there and 0.1 s back; so four transfers pay, and five share."""
    alone = ends([(0.0, 1_000_000)], latency=0.1, window=50_000)
    assert alone == [pytest.approx(4.1)]
    assert ends([(0.0, 1_000_000)] * 4, latency=0.1, window=50_000) == pytest.approx(alone * 4)
    assert ends([(0.0, 1_000_000)] * 5, latency=0.1, window=50_000) == pytest.approx([5.1] * 5)


def test_payload_has_a_share_of_the_rate_up_to_a_ceiling() -> None:
    assert ends([(0.0, 1_000_000)], efficiency=0.8) == [pytest.approx(1.25)]
    assert ends([(0.0, 1_000_000)] * 2, efficiency=0.8, ceiling=4e6) == pytest.approx([4.0, 4.0])


transfers = st.lists(st.tuples(st.floats(0, 1), st.integers(1000, 500_000)), min_size=1, max_size=6)


@settings(max_examples=50, deadline=None)
@given(transfers)
def test_no_rate_is_lost_or_made(given: list[tuple[float, int]]) -> None:
    """The line is busy as long as a queue would be, and nobody ends before all of its bytes could have come alone."""
    free = 0.0
    for moment, nbytes in sorted(given):
        free = max(free, moment) + nbytes / 1e6
    found = ends(given)
    assert max(found) == pytest.approx(free, rel=1e-6)
    assert all(end >= moment + nbytes / 1e6 - 1e-6 for end, (moment, nbytes) in zip(found, given, strict=True))


@settings(max_examples=20, deadline=None)
@given(transfers)
def test_ends_are_those_of_a_simulation_in_small_steps(given: list[tuple[float, int]]) -> None:
    step, now = 1e-3, 0.0
    left, found = [float(nbytes) for _, nbytes in given], [0.0] * len(given)
    while max(left) > 0:
        there = [number for number, (moment, _) in enumerate(given) if moment <= now and left[number] > 0]
        now += step
        for number in there:
            left[number] -= 1e6 * step / len(there)
            if left[number] <= 0:
                found[number] = now
    assert ends(given) == pytest.approx(found, abs=len(given) * 3 * step)
