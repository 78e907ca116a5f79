"""One algorithm file, two runners: real processes and loopback agree, bit by bit where sums are exact."""

from typing import Any

import pytest
import torch

from gossamer import loopback
from gossamer.comm.connect import connect
from processes.harness import Process, launch, require
from processes.scenarios_runners import WORLDS, algorithms, is_exact, long_messages, outer_loops, train_exact, train_real


@pytest.fixture(scope="module")
def processes() -> list[Process]:
    return launch("scenarios_runners", ["every_world", "long_messages_in_every_world"], max(WORLDS), timeout=240)


@pytest.fixture(scope="module")
def seen(processes: list[Process]) -> list[Any]:
    return require(processes, "every_world")


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sorted(name for name in algorithms() if "PowerSGD" not in name))  # its QR is not exact
def test_exact_sums_are_bit_equal(seen: list[Any], name: str, world: int) -> None:
    inside = loopback(lambda rank: train_exact(algorithms()[name], rank, world), world)
    for rank in range(world):
        outside, (here, sent) = seen[rank]["exact", name, world], inside[rank]
        assert len(outside) == len(here)
        assert all(torch.equal(a, b) for a, b in zip(outside, here, strict=True)), f"rank {rank}"
        assert seen[rank]["sent", name, world] == sent, f"bytes and messages of rank {rank}"


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sorted(name for name, algorithm in algorithms().items() if is_exact(algorithm)))
def test_exact_algorithms_agree_on_real_data(seen: list[Any], name: str, world: int) -> None:
    inside = loopback(lambda rank: train_real(algorithms()[name], rank, world), world)
    for rank in range(world):
        for outside, here in zip(seen[rank]["real", name, world], inside[rank], strict=True):
            torch.testing.assert_close(outside, here, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world", WORLDS[1:])
@pytest.mark.parametrize("name", sorted(outer_loops()))
def test_outer_loops_agree_on_real_data(seen: list[Any], name: str, world: int) -> None:
    inside = loopback(lambda rank: train_real(outer_loops()[name], rank, world), world)
    for rank in range(world):
        for outside, here in zip(seen[rank]["real", name, world], inside[rank], strict=True):
            torch.testing.assert_close(outside, here, rtol=0, atol=1e-10)


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize("name", sorted(name for name, a in algorithms().items() if a.subject == "gradients"))
def test_all_ranks_are_bit_identical(seen: list[Any], name: str, world: int) -> None:
    for kind in ("exact", "real"):
        for rank in range(world if (kind, name, world) in seen[0] else 0):
            assert all(map(torch.equal, seen[rank][kind, name, world], seen[0][kind, name, world])), (kind, rank)


@pytest.mark.parametrize("world", WORLDS[1:])
def test_messages_in_rounds_arrive_where_they_should(processes: list[Process], world: int) -> None:
    outside = require(processes, "long_messages_in_every_world")
    inside = loopback(lambda rank: long_messages(connect()), world)
    for rank in range(world):
        assert len(outside[rank][world]) == len(inside[rank])
        assert all(map(torch.equal, outside[rank][world], inside[rank])), rank
