"""Operation: one communication operation of all members as data, with what it sends and whom it waits for.

Ownership: from its start until its result arrives the tensor of an operation belongs to the runner. ``AllReduce`` and
``Broadcast`` write their result into it; the others only read it and return a new tensor.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from gossamer.comm.digraph import Digraph
from gossamer.comm.topology import Permutation
from gossamer.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Traffic:
    """What one rank hands to the transport: payload ``bytes`` sent, and ``rounds`` of messages that follow each other."""

    bytes: int
    rounds: int


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One communication operation over all members. ``tensor`` is contiguous; its shape and dtype agree on all ranks.

    Raises:
        ConfigurationError: it is not contiguous. Transports are given the address of its first element, and would read, and
            write, what lies between its elements.
    """

    name: ClassVar[str] = "op"
    tensor: Tensor

    def __post_init__(self) -> None:
        if not self.tensor.is_contiguous():
            raise ConfigurationError(f"{self}: the tensor is not contiguous (strides {self.tensor.stride()}); send a copy")

    def traffic(self, world: int) -> Traffic:
        """Payload bytes and successive messages of one rank among ``world``."""
        raise NotImplementedError

    def sent(self, world: int, rank: int) -> Traffic:
        """What the ``rank``-th member hands to the transport, where that differs between them."""
        return self.traffic(world)

    def messages(self, world: int) -> int:
        """How many messages one rank sends, whether or not they follow each other."""
        return self.traffic(world).rounds

    def detail(self) -> str:
        """Whatever besides shape and dtype must agree between ranks."""
        return ""

    def peers(self, rank: int, world: int) -> str:
        """The ranks that this operation waits for, in words."""
        return f"all {world} ranks"

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.tensor.numel() * self.tensor.element_size()

    def __str__(self) -> str:
        dtype = str(self.tensor.dtype).removeprefix("torch.")
        return f"{self.name}({dtype}{list(self.tensor.shape)}{self.detail()})"


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce(Op):
    """Sum (or maximum) over all ranks, in place; every rank receives the same bits."""

    name: ClassVar[str] = "all_reduce"
    reduce: Literal["sum", "max"] = "sum"

    def traffic(self, world: int) -> Traffic:
        """A ring: 2·(p−1)/p of the tensor, in 2·(p−1) rounds."""
        return Traffic(math.ceil(2 * (world - 1) * self.nbytes / world), 2 * (world - 1))

    def detail(self) -> str:
        return "" if self.reduce == "sum" else f", {self.reduce}"


@dataclass(frozen=True, slots=True, eq=False)
class Messages(Op):
    """Every rank sends one message of one size to each of some ranks, all concurrently."""

    to_all: ClassVar[bool] = False
    """Whether every rank sends to every other one."""

    def outgoing(self, rank: int, world: int) -> list[tuple[int, Tensor]]:
        """What ``rank`` sends: destinations (itself may be one), and what goes there."""
        raise NotImplementedError

    def incoming(self, rank: int, world: int, result: Tensor) -> list[tuple[int, Tensor]]:
        """Where in its ``result`` the message of each source goes."""
        return list(enumerate(result))

    def most(self, world: int) -> int:
        """Messages of the rank that sends, or receives, most."""
        return world - 1

    def messages(self, world: int) -> int:
        return self.most(world)

    def message_bytes(self, world: int) -> int:
        """Size of one message."""
        return self.nbytes

    def traffic(self, world: int) -> Traffic:
        """Priced at the rank that sends, or receives, most."""
        most = self.most(world)
        return Traffic(most * self.message_bytes(world), min(1, most))


@dataclass(frozen=True, slots=True, eq=False)
class Permute(Messages):
    """Every rank sends its tensor along a permutation and receives one of the same shape; in ``into``, if that is given
    and the runner has use for it."""

    name: ClassVar[str] = "permute"
    permutation: Permutation
    into: Tensor | None = None

    def outgoing(self, rank: int, world: int) -> list[tuple[int, Tensor]]:
        return [(self.permutation.destination(rank), self.tensor)]

    def incoming(self, rank: int, world: int, result: Tensor) -> list[tuple[int, Tensor]]:
        return [(self.permutation.source(rank), result)]

    def most(self, world: int) -> int:
        return int(any(to != rank for rank, to in enumerate(self.permutation.to)))

    def sent(self, world: int, rank: int) -> Traffic:
        """Nothing where it has a bye."""
        return Traffic(0, 0) if self.permutation.destination(rank) == rank else Traffic(self.nbytes, 1)

    def detail(self) -> str:
        return f", to={list(self.permutation.to)}"

    def peers(self, rank: int, world: int) -> str:
        return f"rank {self.permutation.source(rank)} (sending to rank {self.permutation.destination(rank)})"


@dataclass(frozen=True, slots=True, eq=False)
class Push(Messages):
    """Every rank sends its tensor along its edges of ``graph``; the result stacks what came, in order of the senders:
    ``(number of senders, *shape)``."""

    name: ClassVar[str] = "push"
    graph: Digraph

    def outgoing(self, rank: int, world: int) -> list[tuple[int, Tensor]]:
        return [(to, self.tensor) for to in self.graph.destinations(rank)]

    def incoming(self, rank: int, world: int, result: Tensor) -> list[tuple[int, Tensor]]:
        return list(zip(self.graph.sources(rank), result, strict=True))

    def most(self, world: int) -> int:
        return self.graph.most_messages

    def sent(self, world: int, rank: int) -> Traffic:
        targets = len(self.graph.destinations(rank))
        return Traffic(targets * self.nbytes, min(1, targets))

    def detail(self) -> str:
        return f", to={[list(targets) for targets in self.graph.to]}"

    def peers(self, rank: int, world: int) -> str:
        return f"ranks {list(self.graph.sources(rank))} (sending to {list(self.graph.destinations(rank))})"


@dataclass(frozen=True, slots=True, eq=False)
class AllToAll(Messages):
    """Row ``j`` of a ``(world, n)`` tensor goes to rank ``j``; row ``i`` of the result came from rank ``i``."""

    name: ClassVar[str] = "all_to_all"
    to_all: ClassVar[bool] = True

    def outgoing(self, rank: int, world: int) -> list[tuple[int, Tensor]]:
        return list(enumerate(self.tensor))

    def message_bytes(self, world: int) -> int:
        return self.nbytes // world


@dataclass(frozen=True, slots=True, eq=False)
class AllGather(Messages):
    """Every rank receives a ``(world, *shape)`` tensor whose row ``i`` is the tensor of rank ``i``."""

    name: ClassVar[str] = "all_gather"
    to_all: ClassVar[bool] = True

    def outgoing(self, rank: int, world: int) -> list[tuple[int, Tensor]]:
        return [(to, self.tensor) for to in range(world)]


@dataclass(frozen=True, slots=True, eq=False)
class Broadcast(Op):
    """Every rank receives the tensor of rank ``source``, in place."""

    name: ClassVar[str] = "broadcast"
    source: int = 0

    def traffic(self, world: int) -> Traffic:
        """A binomial tree, priced at its root: ⌈log2 p⌉ times the tensor."""
        depth = (world - 1).bit_length()
        return Traffic(self.nbytes * depth, depth)

    def sent(self, world: int, rank: int) -> Traffic:
        times = len(self.receivers(world, rank))
        return Traffic(self.nbytes * times, times)

    def receivers(self, world: int, rank: int) -> list[int]:
        """To whom ``rank`` passes the tensor on: in round ``d`` those ``2ᵈ`` nearest to the source, to that many more."""
        place, rounds = (rank - self.source) % world, range((world - 1).bit_length())
        return [(rank + 2**depth) % world for depth in rounds if place < 2**depth and place + 2**depth < world]

    def detail(self) -> str:
        return f", source={self.source}"

    def peers(self, rank: int, world: int) -> str:
        return f"rank {self.source}"


def result_like(op: Op, world: int, rank: int = 0) -> Tensor:
    """An uninitialised tensor of the shape of the result of ``op`` on ``rank``, for operations that do not work in place."""
    if isinstance(op, Permute) and op.into is not None:
        return op.into
    if isinstance(op, Push):
        return op.tensor.new_empty((len(op.graph.sources(rank)), *op.tensor.shape))
    shape = (world, *op.tensor.shape) if isinstance(op, AllGather) else op.tensor.shape
    return torch.empty(shape, dtype=op.tensor.dtype, device=op.tensor.device)


def carry_out(brought: Sequence[Op]) -> list[Tensor]:
    """What every rank receives when these operations (one per rank, of one kind) meet."""
    first, tensors = brought[0], [op.tensor for op in brought]
    if isinstance(first, AllReduce):
        total = torch.stack(tensors).sum(0, dtype=first.tensor.dtype) if first.reduce == "sum" else torch.stack(tensors).amax(0)
        return [tensor.copy_(total) for tensor in tensors]
    if isinstance(first, Broadcast):
        origin = tensors[first.source].clone()
        return [tensor.copy_(origin) for tensor in tensors]
    if not isinstance(first, Messages):
        raise TypeError(f"no runner knows {first}")
    world = len(brought)
    sent = [dict(op.outgoing(rank, world)) for rank, op in enumerate(brought)]  # type: ignore[attr-defined]
    results = [result_like(op, world, rank) for rank, op in enumerate(brought)]
    for rank, result in enumerate(results):
        for source, place in first.incoming(rank, world, result):
            place.copy_(sent[source][rank])
    return results


def alone(op: Op) -> Tensor:
    """What an operation gives in a world of one: as elsewhere, the tensor itself only where the operation works in place."""
    return op.tensor if isinstance(op, AllReduce | Broadcast) else carry_out([op])[0]
