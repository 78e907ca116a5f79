"""What is predicted of known configurations is what was recorded of them."""

import json
from pathlib import Path

import pytest
import torch

from gossamer.simulate import Compute, step_time

from .configurations import CONFIGURATIONS, LINKS, STEPS, WARMUP, WORLD, model

QUICK = ("100 Mbit/s", "1000 Mbit/s")
"""Networks of `make test`; the others are left to `make test-slow`."""

RECORDED = json.loads((Path(__file__).parent / "golden.json").read_text())


NETWORKS = [*QUICK, *(pytest.param(network, marks=pytest.mark.slow) for network in LINKS if network not in QUICK)]


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_recorded_predictions_are_kept(name: str, network: str) -> None:
    with torch.device("meta"):
        built = model()
    configuration = CONFIGURATIONS[name]
    compute = Compute.uniform(built, forward=0.03, backward=0.06)
    found = step_time(
        built,
        configuration.algorithm,
        world=WORLD,
        link=LINKS[network],
        compute=compute,
        optimizer=configuration.optimizer,
        steps=STEPS,
        warmup=WARMUP,
        buffers="local",
        overlap_forward=configuration.overlap_forward,
    )
    recorded = RECORDED[f"{name} at {network}"]
    # With an overlap a module waits for all of its parameters, and not for each when it is needed.
    slack = 1e-3 * recorded["step_seconds"] if configuration.overlap_forward else 1e-9
    for figure, before in recorded.items():
        assert getattr(found, figure) == pytest.approx(before, rel=1e-9, abs=slack), figure


def test_every_recorded_configuration_is_predicted() -> None:
    assert set(RECORDED) == {f"{name} at {network}" for name in CONFIGURATIONS for network in LINKS}
