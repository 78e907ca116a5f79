"""Torch ports of devices: NCCL, ordered by streams; and Gloo, with a stop in the host's memory."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor
from torch.distributed import distributed_c10d

from gossamer.comm import ops
from gossamer.comm.device import Device
from gossamer.comm.operations import Messages, alone, result_like
from gossamer.comm.ops import Decide, Group, Op
from gossamer.comm.runner import Meter, Ticket
from gossamer.comm.shaper import Shaper
from gossamer.comm.torch.gloo import REDUCE, Circle, GlooPort, Peers, Pending

options: Any = distributed_c10d
"""Where torch keeps the options of its collectives. ``torch.distributed``'s own functions know only groups in its list."""


class DevicePort:
    """All lanes of one rank on NCCL: operations are ordered by streams, the host never waits.

    Both ways of a :class:`Circle` are the same process group here. ``ticket``: the flow that is issued now.
    """

    def __init__(self, everyone: Circle, open_circle: Callable[[Group], Circle], meter: Meter) -> None:
        self.ticket: Ticket[Any] | None = None
        self._everyone, self._open_circle, self._meter = everyone, open_circle, meter
        self._circles: dict[Group, Circle] = {everyone.names: everyone}
        self._asked: list[tuple[str, str]] = []

    def start(self, op: Op, group: Group | None = None) -> Pending:
        if group is not None and group not in self._circles:
            self._circles[group] = self._open_circle(group)
        circle = self._everyone if group is None else self._circles[group]
        self._meter.count(op, circle.world, circle.rank)
        if op.tensor.numel() == 0:
            return Pending(op, [], result_like(op, circle.world, circle.rank))
        if circle.world == 1:
            return Pending(op, [], alone(op))
        peers = Peers(op, circle)
        self._asked.append((op.name, str(peers)))
        if self.ticket is not None:
            self.ticket.doing, self.ticket.peers = op, peers
        return self._issue(op, circle)

    def wait(self, handle: Pending) -> Tensor:
        for work in handle.works:
            work.wait()  # on NCCL: the current stream waits, the host does not
        return handle.result

    def decide(self, decision: Decide) -> Any:
        return decision.fn()

    def asked(self) -> tuple[str, str]:
        """In words, what was issued since this was asked last: the operations, and the ranks that they wait for."""
        asked, self._asked = self._asked, []
        names, peers = (list(dict.fromkeys(texts)) for texts in zip(*asked, strict=True)) if asked else ([], [])
        return " and ".join(names) or "the computation", " and ".join(peers)

    def _issue(self, op: Op, circle: Circle) -> Pending:
        group, rank, world = circle.up, circle.rank, circle.world
        if isinstance(op, ops.AllReduce):
            reduction = options.AllreduceOptions()
            reduction.reduceOp = REDUCE[op.reduce]
            return Pending(op, [group.allreduce([op.tensor], reduction)], op.tensor)
        if isinstance(op, ops.Broadcast):
            source = options.BroadcastOptions()
            source.rootRank = op.source
            return Pending(op, [group.broadcast([op.tensor], source)], op.tensor)
        result = result_like(op, world, rank)
        if isinstance(op, ops.AllToAll):
            return Pending(op, [group.alltoall_base(result, op.tensor, [], [], options.AllToAllOptions())], result)
        if isinstance(op, ops.AllGather):
            return Pending(op, [group._allgather_base(result.view(-1), op.tensor.view(-1), options.AllgatherOptions())], result)
        if isinstance(op, Messages):
            return Pending(op, _batch(circle, op.outgoing(rank, world), op.incoming(rank, world, result)), result)
        raise TypeError(f"the torch runner does not know {op}")


def _batch(circle: Circle, outgoing: list[tuple[int, Tensor]], incoming: list[tuple[int, Tensor]]) -> list[Any]:
    """Send and receive concurrently; a rank's message to itself is a copy.

    What ``dist.batch_isend_irecv`` does, which knows only groups that are registered: on NCCL one launch for all, since
    sends and receives launched one after the other could wait for each other.
    """
    me, group = circle.rank, circle.up
    for mine in (tensor for source, tensor in incoming if source == me):
        mine.copy_(next(tensor for to, tensor in outgoing if to == me))
    sends = [(to, tensor) for to, tensor in outgoing if to != me]
    receives = [(source, tensor) for source, tensor in incoming if source != me]
    if not sends and not receives:
        return []
    device = (sends or receives)[0][1].device
    together = group._get_backend(device).supports_coalescing
    if together:
        group._start_coalescing(device)
    works = [group.send([tensor], to, 0) for to, tensor in sends]
    works += [group.recv([tensor], source, 0) for source, tensor in receives]
    return [group._end_coalescing(device)] if together else works


@dataclass(slots=True)
class Staged:
    """A started operation whose bytes pass through the host."""

    op: Op
    pending: Pending


class StagedPort(GlooPort):
    """A lane on Gloo for tensors of a device, which Gloo's messages cannot read: they pass through pinned memory.

    Runs on a lane's own thread, on the stream that was current when the flow was submitted, so that copies are ordered with
    what wrote the tensors and with what reads the result. The thread waits for its bytes to be on the host, and for no more;
    nothing else does. What lies on the host anyway goes straight to Gloo.
    """

    def __init__(
        self,
        everyone: Circle,
        open_circle: Callable[[Group], Circle],
        meter: Meter,
        shaper: Shaper | None,
        device: Device,
    ) -> None:
        super().__init__(everyone, open_circle, meter, shaper)
        self._device = device

    def start(self, op: Op, group: Group | None = None) -> Any:
        if not self._device.holds(op.tensor):
            return super().start(op, group)
        return Staged(op, super().start(self._on_host(op), group))

    def _on_host(self, op: Op) -> Op:
        host = self._device.to_host(op.tensor)
        if isinstance(op, ops.Permute):
            return replace(op, tensor=host, into=self._device.pinned_like(op.tensor))
        return replace(op, tensor=host)

    def wait(self, handle: Any) -> Tensor:
        if not isinstance(handle, Staged):
            return super().wait(handle)
        op, came = handle.op, super().wait(handle.pending)
        if isinstance(op, ops.AllReduce | ops.Broadcast):
            return self._device.from_host(came, op.tensor)
        return self._device.from_host(came, op.into if isinstance(op, ops.Permute) else None)
