"""hivemind: averages among peers that find each other in a distributed hash table."""

import signal
from contextlib import ExitStack
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gossamer.bench.peers.base import LOCAL_STEPS, Joined, Peer, from_extra, wait_for
from gossamer.bench.ranks import of_all, own_address

_PATIENCE = 120.0


def _hivemind(model: nn.Module, optimizer: Optimizer) -> Joined:
    """``DecentralizedAverager`` averages the weights after every ``LOCAL_STEPS`` steps, in fp16 as its guide advises.

    A group is complete, and begins, when all ranks are in it. ``hivemind.Optimizer`` counts samples instead of
    steps and looks at the count twice a second, so an average every 8 steps cannot be asked of it.
    The averager and the peer-to-peer daemon are processes of their own: their processor time is not in the row.
    """
    from hivemind import DecentralizedAverager
    from hivemind.compression import Float16Compression

    stack = ExitStack()
    dht = _table(stack)
    handler = signal.getsignal(signal.SIGINT)
    averager: Any = DecentralizedAverager(
        [p.data for p in model.parameters()], dht, start=True, prefix="gossamer", target_group_size=dist.get_world_size(),
        min_group_size=dist.get_world_size(), compression=Float16Compression(),
    )  # fmt: skip
    signal.signal(signal.SIGINT, handler)  # the averager makes its parent deaf to Ctrl-C
    stack.callback(wait_for, "hivemind's averager", averager.shutdown)
    taken = 0

    def average(*_: Any) -> None:
        nonlocal taken
        taken += 1
        if taken % LOCAL_STEPS == 0:
            averager.step(timeout=_PATIENCE)

    optimizer.register_step_post_hook(average)
    dist.barrier()
    return Joined(model, optimizer, close=stack.close)


def _table(stack: ExitStack) -> Any:
    """This rank's node of the hash table; the others find rank 0's."""
    from hivemind import DHT

    own = own_address()
    maddr = f"/ip{6 if ':' in own else 4}/{own}/tcp/0"
    where: dict[str, Any] = {"host_maddrs": [maddr], "use_relay": False, "nat_port_map": False}
    dht: Any = DHT(start=True, **where) if dist.get_rank() == 0 else None
    peers = of_all([] if dht is None else [str(each) for each in dht.get_visible_maddrs()])[0]
    if dht is None:
        dht = DHT(initial_peers=peers, start=True, **where)
    stack.callback(wait_for, "hivemind's hash table", dht.shutdown)
    stack.callback(dist.barrier)  # nodes go when nobody looks for anybody any more
    return dht


PEERS = {
    "hivemind": Peer(
        f"hivemind's averager, every {LOCAL_STEPS} steps in fp16",
        _hivemind,
        payload=0.5 / LOCAL_STEPS,
        period=LOCAL_STEPS,
        when="after",
        module="hivemind",
        get=from_extra("hivemind"),
    ),
}
