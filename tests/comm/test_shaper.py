"""The emulated line inside the runner."""

from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fake_device import FakeDevice
from gossamer.comm import shaper as shaper_module
from gossamer.comm.operations import Traffic
from gossamer.comm.ops import AllReduce
from gossamer.comm.runner import Meter
from gossamer.comm.shaper import Shaper, shaper_from_environment
from gossamer.comm.torch import gloo as torch_ports
from gossamer.comm.torch.gloo import Circle, GlooPort, Pending
from gossamer.comm.torch.runner import TorchRunner
from gossamer.errors import ConfigurationError
from gossamer.lab import LabSpec
from gossamer.lab.environment import rank_environment
from hand_clock import HandClock, set_clock

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


def test_where_the_kernel_keeps_the_rate_latency_comes_after_the_bytes() -> None:
    assert Shaper(latency=0.5).after(Traffic(10**12, 4)) == 2.0
    assert Shaper(1e9, 0.5).after(Traffic(10**12, 4)) == 0.0, "it is in due()"


class SlowWork:
    """What a process group returns: done after some seconds."""

    def __init__(self, clock: HandClock, seconds: float) -> None:
        self.clock, self.end = clock, clock.now + seconds

    def is_completed(self) -> bool:
        return self.clock.now >= self.end

    def wait(self, timeout: timedelta | None = None) -> bool:
        remaining = max(0.0, self.end - self.clock.now)
        self.clock.sleep(remaining if timeout is None else min(remaining, timeout.total_seconds()))
        if not self.is_completed():
            raise RuntimeError("the wait has timed out")
        return True


@pytest.mark.parametrize("way", ["wait", "arrives"])
@pytest.mark.parametrize(("seconds", "later", "expected"), [(0.05, 0.0, 0.2), (0.0, 0.2, 0.2)])
def test_an_end_that_was_waited_for_is_delayed_by_the_latency(
    monkeypatch: pytest.MonkeyPatch, way: str, seconds: float, later: float, expected: float
) -> None:
    clock = set_clock(monkeypatch, torch_ports, shaper_module)
    port = GlooPort(Circle(None, None, (0, 1)), lambda group: Circle(None, None, group), Meter())
    begin = clock.now
    handle = Pending(AllReduce(torch.zeros(1)), [SlowWork(clock, seconds)], torch.zeros(1), latency=0.15)
    clock.sleep(later)  # what came in the meantime is there immediately
    while way == "arrives" and not port.arrives(handle, 0.01):
        pass
    port.wait(handle)
    assert clock.now - begin == pytest.approx(expected)


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


@pytest.mark.parametrize("shaping", ["runner", "none"])
def test_the_lab_asks_for_it_by_the_same_names(monkeypatch: pytest.MonkeyPatch, shaping: str) -> None:
    spec = LabSpec(hosts=2, procs_per_host=4, rate="200mbit", latency="5ms")
    for name, value in rank_environment(spec, 0, base={}, shaping=shaping, port=1, run_id="x", delayed=False).items():
        monkeypatch.setenv(name, value)
    shaper = shaper_from_environment()
    assert (shaper and (shaper.rate, shaper.latency)) == ((50e6, 0.005) if shaping == "runner" else None)


def test_streams_are_refused_where_the_runner_would_have_to_shape_them() -> None:
    runner = TorchRunner.__new__(TorchRunner)
    runner.rank, runner._shaper = 3, Shaper(latency=0.005)
    with pytest.raises(ConfigurationError, match=r"rank 3: .* cannot on NCCL.* by Gloo .*--shaping namespaces"):
        runner._open_streams(FakeDevice(), "gossamer.replicate()")
