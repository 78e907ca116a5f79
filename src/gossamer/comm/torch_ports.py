"""Torch ports: operations of the vocabulary on the process groups of ``torch.distributed``."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gossamer.comm import ops
from gossamer.comm.ops import Decide, Op
from gossamer.comm.runner import Meter, Ticket, alone
from gossamer.comm.shaper import Shaper

_REDUCE: dict[str, Any] = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX}


@dataclass(slots=True)
class Pending:
    """A started operation: what to wait for, and the tensor that then holds the result."""

    op: Op
    works: list[Any]
    result: Tensor
    due: float = 0.0


PIECE = 2**20
"""Bytes that travel as one Gloo message. Each message begins with a round trip that queues behind the data of the
other direction; with several posted at once, one is always on the wire (8 MB between a pair at 1 Gbit/s: 852 Mbit/s as
one message, 890 in pieces; plain TCP 934)."""


def pieces(tensor: Tensor) -> Sequence[Tensor]:
    """Views of a contiguous tensor, each of at most ``PIECE`` bytes."""
    split: Sequence[Tensor] = tensor.view(-1).split(PIECE // tensor.element_size())
    return split


class GlooPort:
    """One lane on Gloo, blocking its own thread only.

    Two process groups, because one Gloo connection behaves half-duplex: ``up`` carries what is sent to a higher rank,
    ``down`` what is sent to a lower one, so that the two directions between a pair never share a connection.
    """

    def __init__(self, up: Any, down: Any, meter: Meter, shaper: Shaper | None = None) -> None:
        self.ticket: Ticket[Any] | None = None
        self._up, self._down, self._meter, self._shaper = up, down, meter, shaper
        self._rank, self._world = up.rank(), up.size()

    def start(self, op: Op) -> Pending:
        self._meter.count(op, self._world)
        if op.tensor.numel() == 0:
            return Pending(op, [], ops.result_like(op, self._world))
        pending = self._issue(op)
        if self._shaper is not None:
            pending.due = self._shaper.due(op.traffic(self._world), time.perf_counter())
        return pending

    def wait(self, handle: Pending) -> Tensor:
        begin = time.perf_counter()
        if self.ticket is not None:
            self.ticket.doing, self.ticket.peers = str(handle.op), handle.op.peers(self._rank, self._world)
        for work in handle.works:
            work.wait()
        Shaper.sleep_until(handle.due)
        self._meter.wire_seconds += time.perf_counter() - begin
        return handle.result

    def decide(self, decision: Decide) -> Any:
        return decision.fn()

    def _issue(self, op: Op) -> Pending:
        if isinstance(op, ops.AllReduce):
            options = dist.AllreduceOptions()
            options.reduceOp = _REDUCE[op.reduce]
            return Pending(op, [self._up.allreduce([op.tensor], options)], op.tensor)
        if isinstance(op, ops.Broadcast):
            return Pending(op, [dist.broadcast(op.tensor, group=self._up, group_src=op.source, async_op=True)], op.tensor)
        result = ops.result_like(op, self._world)
        if isinstance(op, ops.Permute):
            there, back = op.permutation.destination(self._rank), op.permutation.source(self._rank)
            return Pending(op, self._exchange([(there, op.tensor)], [(back, result)]), result)
        if isinstance(op, ops.AllToAll):
            return Pending(op, self._exchange(list(enumerate(op.tensor)), list(enumerate(result))), result)
        if isinstance(op, ops.AllGather):
            outgoing = [(rank, op.tensor) for rank in range(self._world)]
            return Pending(op, self._exchange(outgoing, list(enumerate(result))), result)
        raise TypeError(f"the torch runner does not know {op}")

    def _exchange(self, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> list[Any]:
        """Post all receives, then all sends; a rank's message to itself is a copy."""
        me, works = self._rank, []
        for source, tensor in incoming:
            if source != me:
                group = self._up if source < me else self._down
                works += [group.recv([piece], source, 0) for piece in pieces(tensor)]
        for destination, tensor in outgoing:
            if destination != me:
                group = self._up if destination > me else self._down
                works += [group.send([piece], destination, 0) for piece in pieces(tensor)]
            else:
                next(mine for source, mine in incoming if source == me).copy_(tensor)
        return works


class DevicePort:
    """All lanes of one rank on a device backend (NCCL): operations are ordered by streams, the host never waits."""

    def __init__(self, group: Any, meter: Meter) -> None:
        self._group, self._meter = group, meter
        self._rank, self._world = group.rank(), group.size()

    def start(self, op: Op) -> Pending:
        self._meter.count(op, self._world)
        if op.tensor.numel() == 0:
            return Pending(op, [], ops.result_like(op, self._world))
        return self._issue(op)

    def wait(self, handle: Pending) -> Tensor:
        for work in handle.works:
            work.wait()  # on NCCL: the current stream waits, the host does not
        return handle.result

    def decide(self, decision: Decide) -> Any:
        return decision.fn()

    def _issue(self, op: Op) -> Pending:
        group = self._group
        if self._world == 1:
            return Pending(op, [], alone(op))
        if isinstance(op, ops.AllReduce):
            return Pending(op, [dist.all_reduce(op.tensor, _REDUCE[op.reduce], group=group, async_op=True)], op.tensor)
        if isinstance(op, ops.Broadcast):
            return Pending(op, [dist.broadcast(op.tensor, group=group, group_src=op.source, async_op=True)], op.tensor)
        result = ops.result_like(op, self._world)
        if isinstance(op, ops.Permute):
            return Pending(op, self._permute(op, result), result)
        if isinstance(op, ops.AllToAll):
            return Pending(op, [dist.all_to_all_single(result, op.tensor, group=group, async_op=True)], result)
        if isinstance(op, ops.AllGather):
            return Pending(op, [dist.all_gather_into_tensor(result, op.tensor, group=group, async_op=True)], result)
        raise TypeError(f"the torch runner does not know {op}")

    def _permute(self, op: ops.Permute, result: Tensor) -> list[Any]:
        there, back = op.permutation.destination(self._rank), op.permutation.source(self._rank)
        if there == self._rank:
            result.copy_(op.tensor)
            return []
        send = dist.P2POp(dist.isend, op.tensor, group=self._group, group_peer=there)
        receive = dist.P2POp(dist.irecv, result, group=self._group, group_peer=back)
        works: list[Any] = dist.batch_isend_irecv([send, receive])
        return works
