"""Share: one rank's part of the samples, and how it is cut into batches."""

import torch
from torch import Tensor

from gossamer.comm.ops import all_gather
from gossamer.comm.runner import Runner
from gossamer.data.options import Options
from gossamer.engine.agreement import digest
from gossamer.errors import ConfigurationError


def cut(size: int, batches: int, batch_size: int) -> list[int]:
    """Sizes of ``batches`` batches: full ones and a rest; if that leaves none for the last, equal ones (±1)."""
    rest = size - (batches - 1) * batch_size
    if rest > 0:
        return [batch_size] * (batches - 1) + [rest]
    return [size // batches + (index < size % batches) for index in range(batches)]


def in_full(order: Tensor, batches: int, batch_size: int) -> tuple[Tensor, ...]:
    """``order`` (the numbers of samples) in ``batches`` full batches; behind each, its part of the remaining ones."""
    used = batches * batch_size
    pairs = zip(order[:used].split(batch_size), order[used:].tensor_split(batches), strict=True)
    return tuple(torch.cat(pair) for pair in pairs)


def batches_in(epoch: int, share: int, size: int, batches: int, options: Options) -> tuple[Tensor, ...]:
    """The samples of each batch of a share of ``size`` in a local epoch, as numbers within the share."""
    order = drawn(size, f"{options.seed}/{share}/{epoch}") if options.mix else torch.arange(size)
    if not options.drop_last:
        return torch.split(order, cut(size, batches, options.batch_size))
    if not options.mix:  # where the last local epoch stopped
        order = order.roll(-epoch * batches * options.batch_size)
    return in_full(order, batches, options.batch_size)


def batches_of(sizes: list[int], batch_size: int, drop_last: bool = False) -> int:
    """Batches per local epoch. The same error on every rank if some share is too small.

    As many as the largest share makes; with ``drop_last``, as many full ones as the smallest makes.
    """
    smallest, largest = min(sizes), max(sizes)
    rank, steps = sizes.index(smallest), -(-largest // batch_size)
    if smallest < batch_size:
        raise ConfigurationError(
            f"rank {rank} holds {smallest} samples, fewer than one batch of {batch_size}: take a batch_size of at most "
            f"{smallest}, or give this rank more samples"
        )
    if drop_last:
        return smallest // batch_size
    if smallest < steps:
        raise ConfigurationError(
            f"rank {rank} holds {smallest} samples, but the {largest} of rank {sizes.index(largest)} make {steps} batches of "
            f"{batch_size}, and every rank takes as many: give the ranks shares of about equal size, or drop_last=True"
        )
    return steps


def gathered(runner: Runner, number: int) -> list[int]:
    """The numbers of all ranks."""
    mine = torch.tensor([number], dtype=torch.int64)
    everyone: list[int] = runner.run(lambda: all_gather(mine), "the sizes of the shares").flatten().tolist()
    return everyone


def drawn(size: int, name: str) -> Tensor:
    """A permutation of 0 … size − 1 that depends on its name alone, not on any generator's state."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(digest(name)), device="cpu")
