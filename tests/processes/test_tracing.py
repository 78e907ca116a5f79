"""What users look at: traces, and the rank that others wait for; two real processes."""

import pytest

from processes.harness import Process, launch, require

SCENARIOS = ["a_trace_shows_flows_wires_and_waits_by_bucket", "the_rank_that_others_wait_for_is_named"]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch("scenarios_tracing", SCENARIOS, 2, timeout=200)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_it_is_shown(ended: list[Process], scenario: str) -> None:
    require(ended, scenario)
