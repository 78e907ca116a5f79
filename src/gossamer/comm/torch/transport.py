"""Transport: what the user's process group can do for the device on which a model lies."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gossamer.comm.device import Device
from gossamer.errors import ConfigurationError, DisagreementError


@dataclass(frozen=True, slots=True)
class Transport:
    """What moves the tensors of buckets: a backend, for a device or for the host (None)."""

    backend: str
    device: Device | None = None

    @property
    def streams(self) -> bool:
        """Whether operations are ordered by streams, and the host waits for none."""
        return self.backend == dist.Backend.NCCL

    def __str__(self) -> str:
        return f"tensors on {'cpu' if self.device is None else self.device.device.type}, moved by {self.backend}"


HOST = Transport("gloo")


def transport_for(group: Any, devices: Collection[torch.device], rank: int) -> Transport:
    """How to move tensors that lie on ``devices`` among the ranks of a process group.

    Decided by what the group really has for that kind of device: its name may be ``undefined``, or that of several backends.

    Raises:
        ConfigurationError: the group has nothing for it, or something that we do not know; tensors on several devices.
    """
    away = [device for device in devices if device.type not in ("cpu", "meta")]
    if not devices:
        return HOST
    if len(set(away)) > 1:
        named = ", ".join(sorted(map(str, away)))
        raise ConfigurationError(
            f"rank {rank}: the parameters lie on several devices ({named}); one per rank can be replicated"
        )
    where = away[0] if away else torch.device("cpu")
    backend, config = backend_for(group, where.type), dist.get_backend_config(group)
    if backend is None:
        raise ConfigurationError(
            f"rank {rank}: the parameters lie on {where}, and the process group has no backend for it (only "
            f"{config}): move the model before replicate(), or init_process_group({_ADVICE.get(where.type, 'another one')})"
        )
    if not away:
        return HOST
    if backend not in (dist.Backend.NCCL, dist.Backend.GLOO):
        raise ConfigurationError(
            f"rank {rank}: the process group moves tensors on {where.type} by {backend}; gossamer knows nccl and gloo"
        )
    if len(set(devices)) > 1:
        raise ConfigurationError(
            f"rank {rank}: some parameters, or buffers that travel with them, lie on {where} and some on the host; all must "
            f"lie on {where} (or give replicate() buffers='local')"
        )
    return Transport(str(backend), Device(where))


_ADVICE = {"cuda": '"cpu:gloo,cuda:nccl"', "cpu": '"gloo"'}


def backend_for(group: Any, kind: str) -> str | None:
    """The backend that a process group has for a kind of device, by name; None if there is none."""
    pairs = dict(pair.split(":", 1) for pair in dist.get_backend_config(group).split(","))
    return pairs.get(kind)


def told(transport: Transport) -> Tensor:
    """``int64[8]``: a transport in a tensor, for :func:`same_everywhere`."""
    return torch.tensor(list(str(transport).encode()[:64].ljust(64)), dtype=torch.uint8).view(torch.int64)


def same_everywhere(everyone: Tensor, rank: int) -> None:
    """Raise DisagreementError unless all ranks mean the same transport (``int64[world, 8]``)."""
    texts = [bytes(row.view(torch.uint8).tolist()).decode().strip() for row in everyone.contiguous()]
    if len(set(texts)) > 1:
        who = "; ".join(f"rank {index}: {text}" for index, text in enumerate(texts))
        raise DisagreementError(f"rank {rank}: ranks differ in where the model lies, or in the process group: {who}")
