"""Ranks: what each of them has, known to all."""

from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")


def of_all(value: T) -> list[T]:
    """What every rank has, by rank. Collective."""
    found: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found
