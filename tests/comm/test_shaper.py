"""The emulated line inside the runner."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gossamer.comm.ops import Traffic
from gossamer.comm.shaper import Shaper, shaper_from_environment

traffics = st.builds(Traffic, st.integers(0, 10**7), st.integers(0, 20))
arrivals = st.lists(st.tuples(st.floats(0, 0.1), traffics), min_size=1, max_size=20)


@given(arrivals, st.floats(1e5, 1e10), st.floats(0, 0.1))
def test_payloads_queue_and_latencies_overlap(arrivals: list[tuple[float, Traffic]], rate: float, latency: float) -> None:
    shaper, now, free = Shaper(rate, latency), 0.0, 0.0
    for pause, traffic in arrivals:
        now += pause
        free = max(free, now) + 8 * traffic.bytes / rate
        assert shaper.due(traffic, now) == pytest.approx(free + latency * traffic.rounds)


@given(st.lists(traffics, min_size=1, max_size=20), st.floats(1e5, 1e10))
def test_the_rate_is_kept_however_the_bytes_are_cut(cut: list[Traffic], rate: float) -> None:
    shaper = Shaper(rate)
    last = [shaper.due(traffic, 5.0) for traffic in cut][-1]
    assert last == pytest.approx(5 + 8 * sum(traffic.bytes for traffic in cut) / rate)


def test_no_rate_is_no_limit() -> None:
    assert Shaper().due(Traffic(10**12, 1), 3.0) == 3.0
    assert Shaper(latency=0.5).due(Traffic(10**12, 4), 3.0) == 5.0


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"GOSSAMER_LAB_RATE_BPS": "2e8"}, (2e8, 0.0)),
        ({"GOSSAMER_LAB_RATE_BPS": "2e8", "GOSSAMER_LAB_LATENCY_S": "0.005"}, (2e8, 0.005)),
        ({"GOSSAMER_LAB_LATENCY_S": "0.005"}, (float("inf"), 0.005)),
    ],
)
def test_the_environment_asks_for_it(
    monkeypatch: pytest.MonkeyPatch, asked: dict[str, str], expected: tuple[float, float]
) -> None:
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    shaper = shaper_from_environment()
    assert shaper is not None
    assert (shaper.rate, shaper.latency) == expected


def test_nothing_is_shaped_unasked() -> None:
    assert shaper_from_environment() is None
