"""Echo: a port without other ranks, which answers every operation as if all of them had sent what this one sends."""

from typing import Any

from torch import Tensor

from gossamer.comm.operations import AllReduce, AllToAll, Broadcast, Messages, Op, result_like
from gossamer.comm.ops import Decide, Group


class EchoPort:
    """The port of rank ``rank`` among ``world``. Nothing is sent, nobody is waited for."""

    def __init__(self, rank: int, world: int) -> None:
        self._rank, self._everyone = rank, tuple(range(world))

    def start(self, op: Op, group: Group | None = None) -> tuple[Op, Group]:
        return op, self._everyone if group is None else group

    def wait(self, handle: tuple[Op, Group]) -> Tensor:
        op, group = handle
        rank, world = group.index(self._rank), len(group)
        if isinstance(op, AllReduce):
            return op.tensor.mul_(world) if op.reduce == "sum" else op.tensor
        if isinstance(op, Broadcast):
            return op.tensor
        return _received(op, rank, world)

    def decide(self, decision: Decide) -> Any:
        return decision.fn()


def _received(op: Op, rank: int, world: int) -> Tensor:
    """What ``rank`` gets where the tensors of all are equal."""
    assert isinstance(op, Messages)
    result, message = result_like(op, world, rank), op.tensor[rank] if isinstance(op, AllToAll) else op.tensor
    for _, place in op.incoming(rank, world, result):
        place.copy_(message)
    return result
