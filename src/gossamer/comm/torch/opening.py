"""Opening: how the ranks of a replica meet, make their connections, and learn what they need of each other."""

import hashlib
import secrets
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gossamer.comm.device import Device
from gossamer.comm.nodes import here, nodes_from
from gossamer.comm.ops import Group, Port, all_gather
from gossamer.comm.runner import Meter, Ticket
from gossamer.comm.shaper import Shaper
from gossamer.comm.torch.attempts import attempt
from gossamer.comm.torch.board import FailureBoard
from gossamer.comm.torch.device_ports import StagedPort
from gossamer.comm.torch.gloo import GlooPort
from gossamer.comm.torch.groups import Groups, address_among, interfaces
from gossamer.comm.torch.lanes import ThreadLanes
from gossamer.comm.torch.links import Links, described
from gossamer.comm.torch.sockets import Connection
from gossamer.comm.torch.store import Store, StoreLostError
from gossamer.comm.torch.transport import Transport, same_everywhere, told
from gossamer.comm.torch.waiting import WaitPolicy
from gossamer.errors import CommunicationError, ConfigurationError

T = TypeVar("T")

Run = Callable[[Callable[[], Any], str], Tensor]
"""Carries out a flow with a label among all ranks."""


def arrive(
    board: FailureBoard,
    policy: WaitPolicy,
    groups: Groups,
    address: str,
    ended: Callable[[Sequence[int]], Collection[int]],
    what: str,
) -> None:
    """Wait for the other ranks, and choose the address at which this host listens for them.

    ``address``: the one by which it reaches the store. ``ended``: tells which absent ranks can never come.
    """
    try:
        board.arrive(policy.timeout, what, address, ended)
        groups.address = address_among(address, board.addresses())
    except StoreLostError as error:
        raise CommunicationError(f"rank {board.rank}: {what}: the key-value store is lost: {error}") from error
    where = f"at {', '.join(interfaces()) or groups.address or 'the address of its name'}"
    policy.opening_hint = (
        f"; rank {board.rank} listens for the others {where}: if they cannot reach it there, name the network interface "
        "that they can reach by GLOO_SOCKET_IFNAME on every rank"
    )


def threads(
    groups: Groups, timeout: float, world: int, shaper: Shaper | None, device: Device | None, meters: list[Meter]
) -> ThreadLanes:
    """Lanes on Gloo, one per meter, each with process groups of its own."""

    def port(meter: Meter) -> Port:
        open_circle = groups.gloo(timeout)
        everyone = open_circle(tuple(range(world)))
        if device is None:
            return GlooPort(everyone, open_circle, meter, shaper)
        return StagedPort(everyone, open_circle, meter, shaper, device)

    return ThreadLanes([port(meter) for meter in meters], meters, device)


def require_unshaped(shaper: Shaper | None, rank: int) -> None:
    """Raise ConfigurationError where NCCL would have to keep an emulated rate."""
    if shaper is not None:
        raise ConfigurationError(
            f"rank {rank}: the lab has gossamer's runner keep a rate or a latency, which it cannot on NCCL, where the "
            'host waits for nothing: move tensors by Gloo (init_process_group("gloo")), or have the kernel keep the rate '
            "(--shaping namespaces, without --latency where it has no netem)"
        )


def on_a_thread(ticket: Ticket[T], work: Callable[[], T]) -> None:
    """Have ``work``, which waits for other ranks, done by a thread of its own; ``ticket`` takes what it returns or raises."""

    def body() -> None:
        try:
            ticket.result = work()
        except BaseException as error:
            ticket.error = error
        ticket.done.set()

    threading.Thread(target=body, name="gossamer-opening", daemon=True).start()


def agree(run: Run, board: FailureBoard, transport: Transport, machine: int | None) -> tuple[Group, ...]:
    """Learn which ranks share a machine, and the secret of this run, which is what all ranks have drawn.

    It travels over the connections between the ranks, and never lies in the store, where others could read it.
    """
    drawn = torch.frombuffer(bytearray(secrets.token_bytes(32)), dtype=torch.int64)
    mine = torch.cat([drawn, here(machine), told(transport)])
    everyone = run(lambda: all_gather(mine), "the search for machines")
    board.seal(hashlib.sha256(everyone[:, :4].contiguous().numpy().tobytes()).digest())
    same_everywhere(everyone[:, 5:], board.rank)
    return nodes_from(everyone[:, 4:5])


def links(run: Run, own: Collection[Connection], room: int, rank: int) -> Links:
    """Learn which connection leads to which rank. ``room``: for how many connections of a rank there is one."""
    mine = described(own, room)
    return Links.found(own, run(lambda: all_gather(mine), "the search for connections"), rank)


def instance_name(store: Store, ranks: tuple[int, ...], rank: int) -> str:
    """A name for this replica that all of its ranks compute alike: the group, and how many replicas it had before.

    Counted in the store, which is as old as the process group; some of the processes may have been in others before.
    """
    spelled = f"{ranks[0]}-{ranks[-1]}-{len(ranks)}-{hashlib.sha256(repr(ranks).encode()).hexdigest()[:16]}"
    if len(ranks) == 1:  # nobody to differ from
        return f"{spelled}/1"
    return f"{spelled}/{store.add(f'gossamer/attempt-{attempt()}/instances/{spelled}/{rank}', 1)}"
