"""Models under torch.compile train as without it."""

import pytest

from processes.harness import Process, launch, require

SCENARIOS = ["wholly_before", "wholly_after", "blockwise_before", "blockwise_after", "used_before", "overlap_of_blocks"]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch("scenarios_compile", SCENARIOS, 2, timeout=150)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_compiled(ended: list[Process], scenario: str) -> None:
    print(scenario, require(ended, scenario)[0], max(process.reports[scenario].seconds for process in ended))


@pytest.mark.slow
def test_inductor() -> None:
    require(launch("scenarios_compile", ["with_inductor"], 2, timeout=280), "with_inductor")
