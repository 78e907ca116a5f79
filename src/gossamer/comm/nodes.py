"""Nodes: which ranks share a machine."""

import hashlib
import os
import socket

import torch
from torch import Tensor

from gossamer.comm.ops import Group


def here(machine: int | None = None) -> Tensor:
    """``int64[1]``: a number for this machine: the one given, else of torchrun's name for it (``GROUP_RANK``), or its own."""
    if machine is not None:
        return torch.tensor([machine])
    name = os.environ.get("GROUP_RANK") or socket.gethostname()
    return torch.tensor([int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")])


def nodes_from(everyone: Tensor) -> tuple[Group, ...]:
    """The ranks of each machine, from the numbers of all (``int64[world, 1]``), in the order of their first ranks."""
    found: dict[int, list[int]] = {}
    for rank, machine in enumerate(everyone.flatten().tolist()):
        found.setdefault(machine, []).append(rank)
    return tuple(map(tuple, found.values()))
