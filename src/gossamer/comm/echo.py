"""Echo: operations answered without other ranks, as if all of them had sent what this one sends."""

from typing import Any

import torch
from torch import Tensor

from gossamer.comm.operations import AllGather, AllReduce, AllToAll, Broadcast, Op, Permute, Push
from gossamer.comm.ops import Decide, Group

_NEW = torch.contiguous_format


def echoed(op: Op, world: int, rank: int = 0) -> Tensor:
    """The result of an operation on ``rank`` of ``world`` ranks that all bring the same: on ``meta``, its shape."""
    tensor = op.tensor
    if isinstance(op, AllReduce):
        return tensor.mul_(world) if op.reduce == "sum" else tensor
    if isinstance(op, Broadcast):
        return tensor
    if isinstance(op, Permute):
        return tensor.clone() if op.into is None else op.into.copy_(tensor)
    if isinstance(op, Push):
        return tensor.expand(len(op.graph.sources(rank)), *tensor.shape).clone(memory_format=_NEW)
    if isinstance(op, AllToAll):
        return tensor[rank].expand_as(tensor).clone(memory_format=_NEW)
    if isinstance(op, AllGather):
        return tensor.expand(world, *tensor.shape).clone(memory_format=_NEW)
    raise TypeError(f"no runner knows {op}")


class EchoPort:
    """The port of rank ``rank`` among ``world``. Nothing is sent, nobody is waited for."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._everyone = rank, tuple(range(world))

    def start(self, op: Op, group: Group | None = None) -> Tensor:
        group = self._everyone if group is None else group
        return echoed(op, len(group), group.index(self._rank))

    def wait(self, handle: Tensor) -> Tensor:
        return handle

    def decide(self, decision: Decide) -> Any:
        return decision.fn()
