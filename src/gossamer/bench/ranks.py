"""Ranks: what each of them has, known to all."""

import os
import socket
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def of_all(value: T) -> list[T]:
    """What every rank has, by rank. Collective."""
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def own_address(family: int = socket.AF_UNSPEC) -> str:
    """The address of this host as the others see it: that from which it reaches rank 0."""
    family, kind, _, _, rank0 = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, family, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(rank0)  # sends nothing: that is how datagrams are
        return str(probe.getsockname()[0])
