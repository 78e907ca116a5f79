"""Links are measured through the runner; in virtual time what is found must be what was put in."""

from typing import Any

import pytest
import torch

from gossamer import loopback
from gossamer.comm.connect import connect
from gossamer.comm.operations import Traffic
from gossamer.planning.links import PATTERNS, Stopwatch, between, measure_rates, operation
from gossamer.simulate import Cluster, Link, Machines
from gossamer.simulate.clock import Clock
from gossamer.simulate.clocked import ClockedRunner, Wire
from gossamer.simulate.levels import Levels, nodes_of
from gossamer.simulate.processor import Processing


def runner_of(link: Link, world: int) -> ClockedRunner:
    clock, cluster = Clock(), Cluster(machines=Machines(count=world), between=link)
    wire = Wire(clock, Levels(cluster, nodes_of(cluster)), Processing(clock, cluster.processor, 1))
    return ClockedRunner(clock, wire, 2)


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize("mbit", [0.5, 20, 1000, 25_000])
@pytest.mark.parametrize("latency", [0.0, 1e-3, 40e-3])
def test_goodput_and_latency_are_found(world: int, mbit: float, latency: float) -> None:
    runner = runner_of(Link(bandwidth=mbit * 1e6, latency=latency), world)
    found = measure_rates(runner, (tuple(range(world)),), Stopwatch(runner), "between ranks")
    assert runner.now() < 12
    for pattern in PATTERNS:
        rate = getattr(found, pattern)
        assert rate.goodput == pytest.approx(mbit * 1e6, rel=0.1 if not rate.note else 0.5), pattern
        if not rate.note:
            bytes_per_round = 8 * 4096 / (mbit * 1e6)
            assert latency - 1e-9 <= rate.latency <= latency + bytes_per_round + 1e-9


@pytest.mark.parametrize("bits", [100.0, 3e3, 3e4])
def test_a_link_too_slow_to_be_measured_gives_a_stated_fallback(bits: float) -> None:
    """One small message, and what it says, instead of hours."""
    runner = runner_of(Link(bandwidth=bits, latency=0.1), 4)
    found = measure_rates(runner, (tuple(range(4)),), Stopwatch(runner), "between ranks")
    smallest = max(8 * operation(p, 4096, 4, torch.device("cpu")).traffic(4).bytes / bits for p in PATTERNS)
    assert runner.now() < 12 + 2 * smallest + 10
    assert any(getattr(found, pattern).note for pattern in PATTERNS)
    assert all(0 < getattr(found, pattern).goodput <= 1.01 * bits for pattern in PATTERNS)


def test_all_ranks_find_the_same() -> None:
    def body(rank: int) -> Any:
        runner = connect()
        return measure_rates(runner, (tuple(range(3)),), Stopwatch(runner, 1.0), "between ranks")

    first, *others = loopback(body, 3)
    assert all(each == first for each in others)


def test_between_machines_one_rank_of_each_measures() -> None:
    assert between(((0, 1), (2, 3), (4,))) == ((0, 2, 4),)

    def body(rank: int) -> int:
        runner = connect()
        measure_rates(runner, between(((0, 1), (2, 3))), Stopwatch(runner, 0.5), "between machines")
        return sum(meter.bytes for meter in runner.meters())

    sent = loopback(body, 4)
    assert min(sent[0], sent[2]) > 4096 > max(sent[1], sent[3])


def test_an_operation_has_the_traffic_that_its_pattern_says() -> None:
    cpu = torch.device("cpu")
    assert operation("pair", 4096, 4, cpu).traffic(4) == Traffic(4096, 1)
    assert operation("ring", 4096, 4, cpu).traffic(4) == Traffic(6144, 6)
    assert operation("all", 4096, 4, cpu).traffic(4) == Traffic(3072, 1)
