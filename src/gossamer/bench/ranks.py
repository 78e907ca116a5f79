"""Ranks: what each of them has, known to all."""

import os
import socket
from contextlib import suppress
from ipaddress import ip_address
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from gossamer.engine.plain import read, written

T = TypeVar("T")


def of_all(value: T) -> list[T]:
    """What every rank has, by rank: numbers, strings, and containers of them. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    own = written(value).to(device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(own)], device=device))
    longest = max(int(size) for size in sizes)
    rows = [torch.empty(longest, dtype=torch.uint8, device=device) for _ in sizes]
    dist.all_gather(rows, pad(own, (0, longest - len(own))))
    return [read(row[: int(size)].cpu()) for row, size in zip(rows, sizes, strict=True)]


def own_address(family: int = socket.AF_UNSPEC) -> str:
    """The address of this host as the others see it: that from which it reaches rank 0.

    Where the name of rank 0's host means, on that host, the host itself (127.0.1.1 in many an ``/etc/hosts``): that from
    which it reaches the world.
    """
    family, _, _, _, rank0 = socket.getaddrinfo(os.environ["MASTER_ADDR"], 1, family, socket.SOCK_DGRAM)[0]
    found = _own_end(family, rank0)
    local, world = (int(os.environ.get(name, "1")) for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE"))
    if local < world and ip_address(found).is_loopback and "GOSSAMER_LAB" not in os.environ:
        with suppress(OSError):
            return _own_end(family, (_FAR[family], 1))
    return found


_FAR = {socket.AF_INET: "203.0.113.1", socket.AF_INET6: "2001:db8::1"}
"""Addresses for documentation (RFC 5737, RFC 3849), which nobody has."""


def _own_end(family: int, to: Any) -> str:
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(to)  # sends nothing: that is how datagrams are
        return str(probe.getsockname()[0])
