"""Process groups of our own in real processes: what they connect to, and how all begins again with another group."""

import pytest

from processes.harness import Process, launch, require

SCENARIOS = ["connections_of_others_are_left_alone", "a_shuffle_has_one_lane", "another_group_on_the_same_port"]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch("scenarios_groups", SCENARIOS, 3, timeout=120)


@pytest.mark.parametrize("scenario", SCENARIOS[:2])
def test_groups(ended: list[Process], scenario: str) -> None:
    require(ended, scenario)


def test_another_group_on_the_same_port_begins_anew(ended: list[Process]) -> None:
    """And the thread that asked the first store ends with it."""
    for threads in require(ended, SCENARIOS[2]):
        assert len(threads) == 1


def test_all_processes_end_well(ended: list[Process]) -> None:
    for process in ended:
        assert process.code == 0, process.errors[-3000:]
        assert process.errors == ""
