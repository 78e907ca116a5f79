"""Runners for a device, on real processes: CPU tensors play the device's, and Gloo plays NCCL's part."""

from typing import Any

import pytest
import torch

from gossamer import loopback
from processes.harness import launch, require
from processes.scenarios_devices import BACKENDS, JUDGED, WORLDS, on_devices
from processes.scenarios_runners import algorithms, train_exact


@pytest.fixture(scope="module")
def seen() -> dict[str, list[Any]]:
    names = ["every_algorithm", "races", "different_transports", "no_backend_for_it"]
    processes = launch("scenarios_devices", names, max(WORLDS), timeout=240)
    return {name: require(processes, name) for name in names}


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(name for name in on_devices() if "PowerSGD" not in name))  # its QR is not exact
def test_a_device_gives_the_bits_of_the_host(seen: dict[str, list[Any]], name: str, backend: str, world: int) -> None:
    inside = loopback(lambda rank: train_exact(algorithms()[name], rank, world), world)
    for rank in range(world):
        (outside, sent), (here, sent_here) = seen["every_algorithm"][rank][backend, name, world], inside[rank]
        assert len(outside) == len(here)
        assert all(torch.equal(a, b) for a, b in zip(outside, here, strict=True)), f"rank {rank}"
        assert sent == sent_here, f"bytes and messages of rank {rank}"


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", JUDGED)
def test_events_order_all_accesses_of_training(seen: dict[str, list[Any]], name: str, backend: str) -> None:
    assert [races[backend, name] for races in seen["races"]] == [[]] * max(WORLDS)


def test_ranks_with_different_transports_are_told(seen: dict[str, list[Any]]) -> None:
    for rank, text in enumerate(seen["different_transports"]):
        assert text.startswith(f"rank {rank}: ranks differ in where the model lies, or in the process group: ")
        assert "rank 0: tensors on cpu, moved by gloo; rank 1: tensors on cpu, moved by nccl" in text


def test_a_group_that_cannot_move_the_model_is_refused(seen: dict[str, list[Any]]) -> None:
    reason = "the parameters lie on cpu, and the process group has no backend for it (only cuda:nccl)"
    for text in seen["no_backend_for_it"]:
        assert reason in text
    assert seen["no_backend_for_it"][0].startswith("ConfigurationError")
