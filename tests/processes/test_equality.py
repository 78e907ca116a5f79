"""Exact all-reduce equals DDP on real workloads, in real processes."""

import pytest

from processes.harness import launch, require

BOUND_CONVNET = 1e-6


def check(scenario: str, found: dict[str, float], world: int) -> None:
    print(f"{scenario}, {world} ranks: " + ", ".join(f"{name} {value:.2e}" for name, value in found.items()))
    assert found["float64"] <= 1e-10
    assert found["float32 rms"] <= 3 * found["float32 rms, DDP to itself"]
    if scenario.startswith("convnet"):
        assert found["float32"] <= max(BOUND_CONVNET, 3 * found["float32, DDP to itself"])


@pytest.mark.parametrize("world", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_equals_ddp_at_reduced_size(world: int) -> None:
    scenarios = ["gpt_small", "convnet_small"]
    processes = launch("scenarios_equality", scenarios, world, timeout=150)
    for scenario in scenarios:
        check(scenario, require(processes, scenario)[0], world)


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
@pytest.mark.parametrize("scenario", ["gpt_full", "convnet_full"])
def test_equals_ddp_at_full_size(scenario: str, world: int) -> None:
    check(scenario, require(launch("scenarios_equality", [scenario], world, timeout=290), scenario)[0], world)
