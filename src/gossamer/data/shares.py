"""Share: one rank's part of the samples, and how it is cut into batches."""

from typing import Any

import torch
from torch import Tensor

from gossamer.comm.ops import all_gather
from gossamer.comm.runner import Runner
from gossamer.errors import ConfigurationError
from gossamer.sync.agreement import digest


def cut(size: int, batches: int, batch_size: int) -> list[int]:
    """Sizes of ``batches`` batches: full ones and a rest; if that leaves none for the last, equal ones (±1)."""
    rest = size - (batches - 1) * batch_size
    if rest > 0:
        return [batch_size] * (batches - 1) + [rest]
    return [size // batches + (index < size % batches) for index in range(batches)]


def batches_of(sizes: list[int], batch_size: int) -> int:
    """Batches per local epoch. The same error on every rank if some share is too small."""
    smallest, largest = min(sizes), max(sizes)
    rank, steps = sizes.index(smallest), -(-largest // batch_size)
    if smallest == 0:
        raise ConfigurationError(f"rank {rank} holds no sample; every rank needs a share of the data")
    if smallest < batch_size:
        raise ConfigurationError(f"rank {rank} holds {smallest} samples, fewer than one batch of {batch_size}")
    if smallest < steps:
        raise ConfigurationError(
            f"rank {rank} holds {smallest} samples, but the {largest} of rank {sizes.index(largest)} make {steps} batches of "
            f"{batch_size}, and every rank takes as many: give the ranks shares of about equal size"
        )
    return steps


def check_integers(batch_size: Any, seed: Any) -> None:
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise ConfigurationError(f"batch_size must be a positive integer; got {batch_size!r}")
    if not isinstance(seed, int):
        raise ConfigurationError(f"seed must be an integer; got {seed!r}")


def gathered(runner: Runner, number: int) -> list[int]:
    """The numbers of all ranks."""
    mine = torch.tensor([number], dtype=torch.int64)
    everyone: list[int] = runner.run(lambda: all_gather(mine), "the sizes of the shares").flatten().tolist()
    return everyone


def drawn(size: int, name: str) -> Tensor:
    """A permutation of 0 … size − 1 that depends on its name alone, not on any generator's state."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(digest(name)))
