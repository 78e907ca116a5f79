"""Twins: the same training under PyTorch's DDP and under gossamer, to be compared."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import gossamer
from gossamer import AllReduce
from processes.worker import Here

Build = Callable[[], tuple[nn.Module, Sequence[Optimizer]]]


@dataclass
class Run:
    """One of the twins: ``model`` is what is called, ``bare`` what holds the parameters."""

    here: Here
    model: nn.Module
    bare: nn.Module
    optimizers: Sequence[Optimizer]
    no_sync: Callable[[], AbstractContextManager[Any]]
    join: Callable[[], AbstractContextManager[Any]]
    replica: gossamer.Replica | None = None

    @property
    def optimizer(self) -> Optimizer:
        """The only optimizer."""
        (single,) = self.optimizers
        return single


def under_ddp(here: Here, build: Build, **options: Any) -> Run:
    """Train with DDP."""
    model, optimizers = build()
    wrapped = DistributedDataParallel(model, **options)
    return Run(here, wrapped, model, optimizers, wrapped.no_sync, wrapped.join)


def under_gossamer(here: Here, build: Build, algorithm: Any = None, **options: Any) -> Run:
    """Train with gossamer, with buckets so small that there are several."""
    model, optimizers = build()
    replica = here.replicate(model, optimizers, algorithm or AllReduce(bucket_bytes=2048), **options)
    return Run(here, model, model, optimizers, replica.no_sync, replica.join, replica)


def values(model: nn.Module) -> Tensor:
    """All parameters and floating-point buffers of a model as one float64 vector."""
    held = [*model.parameters(), *(b for b in model.buffers() if b.is_floating_point())]
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in held])


def difference(one: nn.Module, other: nn.Module) -> float:
    """The largest difference between two models' values."""
    return (values(one) - values(other)).abs().max().item()


def distance_from_ddp(reference: Run, model: nn.Module) -> float:
    """The largest difference from what DDP's next forward pass begins with: it broadcasts buffers there, gossamer before."""
    if reference.model.broadcast_buffers:
        for buffer in reference.bare.buffers():
            dist.broadcast(buffer, group=reference.model.process_group, group_src=0)
    return difference(reference.bare, model)


def assert_same_on_all_ranks(here: Here, model: nn.Module) -> None:
    """Parameters are bit-identical on all ranks."""
    mine = torch.cat([p.detach().double().reshape(-1) for p in model.parameters()])
    for rank, theirs in enumerate(here.gathered(mine)):
        assert torch.equal(mine, theirs), f"rank {rank} differs by {(mine - theirs).abs().max().item()}"


def equal_to_ddp(
    here: Here,
    build: Build,
    train: Callable[[Run], Any],
    *,
    bound: float = 1e-10,
    ddp: dict[str, Any] | None = None,
    ours: dict[str, Any] | None = None,
) -> float:
    """Train both twins from the same start; returns the largest difference, which is within ``bound``."""
    reference = under_ddp(here, build, **ddp or {})
    train(reference)
    mine = under_gossamer(here, build, **ours or {})
    train(mine)
    assert_same_on_all_ranks(here, mine.bare)
    distance = distance_from_ddp(reference, mine.bare)
    start, _ = build()
    assert difference(start, mine.bare) > 1e-6, "nothing was trained"
    assert distance <= bound, f"differs from DDP by {distance}"
    return distance
