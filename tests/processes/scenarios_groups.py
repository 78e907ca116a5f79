"""Scenarios: the process groups of our own, their connections, and what is left when the user's group ends."""

import gc
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD

import gossamer
from gossamer.comm.torch import process_exit
from gossamer.comm.torch.store import default_store
from gossamer.data import RingShuffle
from processes.expect import raises
from processes.worker import GROUP_TIMEOUT, Here


def replicated(here: Here, **options: Any) -> gossamer.Replica:
    """A replica that has trained for a step."""
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1)
    replica = here.replicate(model, optimizer, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return replica


@contextmanager
def somebody_connects() -> Iterator[list[socket.socket]]:
    """To something else, whenever a group is opened."""
    kind: Any = dist.ProcessGroupGloo
    others: list[socket.socket] = []

    class Meanwhile:
        _Options, create_device, create_default_device = kind._Options, kind.create_device, kind.create_default_device

        def __new__(cls, *arguments: Any) -> Any:
            others.append(socket.create_connection(server.getsockname()))
            return kind(*arguments)

    with socket.create_server(("127.0.0.1", 0)) as server:
        dist.ProcessGroupGloo = Meanwhile  # type: ignore[misc, assignment]
        try:
            yield others
        finally:
            dist.ProcessGroupGloo = kind  # type: ignore[misc]
            for other in others:
                other.close()


def connections_of_others_are_left_alone(here: Here) -> None:
    with somebody_connects() as others:
        replica = replicated(here)
        known = [connection.descriptor for connection in replica._runner._groups.connections]  # type: ignore[attr-defined]
        assert others
        assert not {other.fileno() for other in others} & set(known)
        assert len(known) == 3 * 2 * (here.world - 1), "three lanes, two ways"


def a_shuffle_has_one_lane(here: Here) -> None:
    def lanes() -> int:
        return sum(thread.name.startswith("gossamer-lane") for thread in threading.enumerate())

    before = lanes()
    with RingShuffle(torch.arange(8), 4, timeout=30.0) as shuffle:
        assert lanes() == before + 1
        assert len(shuffle._runner._groups.connections) == 2 * (here.world - 1)  # type: ignore[attr-defined]
        assert len(list(shuffle)) == 2


def another_group_on_the_same_port(here: Here) -> list[str]:
    """As when a rank has died, and a new process takes its place: it has not called replicate() as often as the others."""
    process_exit.LINGER = 0.5
    replicated(here).close()
    if here.rank != 2:
        with raises(gossamer.CommunicationError, "2 not there"):
            replicated(here, timeout=2.0)
    here.close()
    default_store().set("of the first group", "1")
    dist.barrier()
    ended = here.folder / "ended"
    while here.rank > 0 and not ended.exists():  # who came before rank 0 has ended would meet its old store
        time.sleep(0.01)
    dist.destroy_process_group()
    ended.touch()
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    assert not default_store().check(["of the first group"])
    replicated(here).close()
    here.replicas.clear()
    gc.collect()
    end = time.monotonic() + 10.0
    while len(asking()) > 1 and time.monotonic() < end:
        time.sleep(0.01)
    return asking()


def asking() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "gossamer-store"]
