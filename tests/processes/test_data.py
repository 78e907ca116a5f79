"""The ring shuffle in real processes: the same samples as in loopback, and errors that every rank is told of."""

import pytest
import torch

from gossamer import loopback
from processes.harness import Process, launch, require
from processes.scenarios_data import wander

WORLD = 3
SCENARIOS = ["wandering", "training", "differing", "empty", "late", "failing", "leaving"]


@pytest.fixture(scope="module")
def processes() -> list[Process]:
    return launch("scenarios_data", SCENARIOS, WORLD, timeout=90)


def errors(processes: list[Process], scenario: str) -> list[str]:
    """What a scenario raised on every rank; a rank without a report shows its own words."""
    for process in processes:
        assert scenario in process.reports, process.errors[-3000:]
    return [process.reports[scenario].error for process in processes]


def test_the_samples_are_those_of_the_loopback(processes: list[Process]) -> None:
    outside, inside = require(processes, "wandering"), loopback(wander, WORLD)
    assert outside == inside
    for seen, again, _ in outside:
        assert again == seen[7:9], "resumed after the first batch of the third local epoch"
    assert sorted(name for _, _, held in outside for name in held) == sorted(
        100 * r + i for r in range(WORLD) for i in range(11 - r)
    )


def test_it_works_beside_a_replica(processes: list[Process]) -> None:
    first, *others = require(processes, "training")
    assert all(torch.equal(first, other) for other in others)


def test_every_rank_is_told_of_samples_that_differ(processes: list[Process]) -> None:
    for error in errors(processes, "differing"):
        assert "DisagreementError" in error
        assert "ranks 0, 2: float32[]; rank 1: float64[]" in error


def test_every_rank_is_told_of_an_empty_share(processes: list[Process]) -> None:
    assert all("rank 2 holds no sample" in error for error in errors(processes, "empty"))


def test_who_comes_too_late_is_told_what_for(processes: list[Process]) -> None:
    assert all("gossamer.data.RingShuffle(): rank 2 not there after 2 s" in error for error in errors(processes, "late"))


def test_a_failure_of_one_rank_ends_the_others_soon(processes: list[Process]) -> None:
    assert all("the loss is NaN" in error for error in errors(processes, "failing"))
    assert all(process.reports["failing"].seconds < 30 for process in processes)


def test_a_rank_that_leaves_is_named(processes: list[Process]) -> None:
    told = errors(processes, "leaving")
    assert told[1] == ""
    assert any("PeerLeftError" in error and "rank 1" in error for error in told)
    assert all(told[rank] != "" for rank in (0, 2))
    assert all(process.reports["leaving"].seconds < 30 for process in processes)
