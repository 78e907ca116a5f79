"""Scenarios: runners for a device, where CPU tensors play the device's, and Gloo plays NCCL if it has to."""

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gossamer
from fake_device import FakeDevice
from gossamer import AllReduce, ChunkSparse, Gossip, Hierarchical, ScatterReduce
from gossamer.algorithms.base import Algorithm
from gossamer.comm.torch import groups as torch_groups
from gossamer.comm.torch import runner as torch_runner
from gossamer.comm.torch.gloo import GlooPort
from gossamer.comm.torch.transport import Transport
from gossamer.errors import ConfigurationError, DisagreementError
from processes.scenarios_runners import algorithms, train_exact
from processes.worker import Here

WORLDS = (3,)
BACKENDS = ("gloo", "nccl")


def gloo_for_nccl(store: Any, rank: int, ranks: list[int], name: str, timeout: timedelta) -> Any:
    """What :func:`torch_groups.nccl` makes, of another metal."""
    return dist.ProcessGroupGloo(store, rank, len(ranks), timeout)


@contextmanager
def faked(backend: str) -> Iterator[FakeDevice]:
    """Let runners take CPU tensors for those of a device, which such a backend moves."""
    device = FakeDevice()
    transport = Transport(backend, device)
    with (
        mock.patch.object(torch_runner, "transport_for", return_value=transport),
        mock.patch.object(torch_groups, "nccl", gloo_for_nccl),
        mock.patch.object(GlooPort, "_issue", only_pinned(device, GlooPort._issue)),
    ):
        yield device


def only_pinned(device: FakeDevice, issue: Any) -> Any:
    """Gloo reads the host's memory only."""

    def checked(port: GlooPort, op: Any, circle: Any) -> Any:
        assert device.is_pinned(op.tensor), f"{op} would hand memory of the device to Gloo"
        return issue(port, op, circle)

    return checked


def on_devices() -> dict[str, Algorithm]:
    """Every algorithm, with one 16-bit wire: to a runner, both are the same."""
    return {name: algorithm for name, algorithm in algorithms().items() if getattr(algorithm, "wire", "") != "fp16"}


def every_algorithm(here: Here) -> dict[tuple[str, str, int], list[Tensor]]:
    """What this rank saw with every algorithm over staged Gloo and over streams, in every world.

    First ranks come to belong to different numbers of groups, by which torch's own naming of groups would hang.
    """
    if here.rank < 2:
        dist.new_group([0, 1], use_local_synchronization=True)
    seen = {}
    for world in WORLDS:
        group = dist.new_group(list(range(world)))
        if here.rank >= world:
            continue
        for backend in BACKENDS:
            for name, algorithm in on_devices().items():
                with faked(backend):
                    seen[backend, name, world] = train_exact(algorithm, here.rank, world, group=group, timeout=30.0)
    return seen


JUDGED = {
    "AllReduce": AllReduce(bucket_bytes=64),
    "ScatterReduce": ScatterReduce(bucket_bytes=64, gather_below=0),
    "ChunkSparse": ChunkSparse(bucket_bytes=64, chunk=8),
    "Gossip": Gossip(bucket_bytes=64),
    "Hierarchical": Hierarchical(Gossip(), bucket_bytes=64, ranks_per_node=2),
}


def races(here: Here) -> dict[tuple[str, str], list[str]]:
    """Accesses to a tensor that no event orders, in some steps of training."""
    found = {}
    for backend in BACKENDS:
        for name, algorithm in JUDGED.items():
            with faked(backend) as device, device.judged() as judge:
                train_exact(algorithm, here.rank, here.world, timeout=30.0)
                found[backend, name] = list(dict.fromkeys(judge.races))
    return found


def different_transports(here: Here) -> str:
    """Ranks that would wait for each other in different places say so instead."""
    model = nn.Linear(2, 2)
    with faked(BACKENDS[here.rank % 2]):
        try:
            here.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1))
        except DisagreementError as error:
            return str(error)
    return ""


def no_backend_for_it(here: Here) -> str:
    """A group without a backend for the model's device; the ranks whose model is elsewhere are told."""
    model = nn.Linear(2, 2)
    group = dist.new_group(list(range(here.world)))
    if here.rank == 0:
        dist.distributed_c10d._world.pg_backend_config[group] = "cuda:nccl"
    try:
        gossamer.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), group=group)
    except (ConfigurationError, gossamer.CommunicationError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
