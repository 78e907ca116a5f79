"""torchft: local training with fault-tolerant averages, and its DDP."""

import json
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import torch.distributed as dist
from torch import nn
from torch.optim import SGD, Optimizer

from gossamer.bench.bound import When
from gossamer.bench.peers.base import LOCAL_STEPS, Joined, Peer, from_extra, wait_for
from gossamer.bench.ranks import of_all, own_address

_PATIENCE = timedelta(seconds=60)

# It writes kilobytes for every quorum otherwise; read when it is imported.
os.environ.setdefault("RUST_LOG", "warn")


@dataclass(frozen=True, slots=True)
class _Quorum:
    """A manager of this rank, and on rank 0 the lighthouse at which the managers of all ranks meet."""

    manager: Any
    stack: ExitStack

    def joined(self, model: nn.Module, optimizer: Any) -> Joined:
        """What to train with."""
        return Joined(model, optimizer, close=self.stack.close)


def _meet(asynchronous: bool = False) -> _Quorum:
    """Every rank is a group of one: its own store, its own manager, and a lighthouse in rank 0's process.

    ``asynchronous``: the quorum is found while the forward pass goes on, torchft's default; DiLoCo demands that it is there
    before the exchange, and nothing is computed between the two in LocalSGD. Configured for speed: all replicas
    begin alike, so nothing is copied at the first step; heartbeats once a second and not ten times, because other methods take
    turns with this one. An exchange that failed is an error, and not a step that is left out.
    """
    from torchft import Manager
    from torchft.coordination import LighthouseServer

    rank, world, host = dist.get_rank(), dist.get_world_size(), own_address()
    stack, own = ExitStack(), ""
    if rank == 0:
        lighthouse = LighthouseServer(bind="[::]:0", min_replicas=world)
        stack.callback(wait_for, "torchft's lighthouse", lighthouse.shutdown)
        own = f"http://{_in_url(host)}:{urlsplit(lighthouse.address()).port}"
    address = of_all(own)[0]
    stack.callback(dist.barrier)  # the lighthouse goes when no manager needs it any more
    store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    group = _reachable(host)
    stack.callback(wait_for, "torchft's process group", group.shutdown)
    manager = Manager(
        pg=group, load_state_dict=None, state_dict=None, min_replica_size=world, rank=0, world_size=1,
        use_async_quorum=asynchronous, store_addr=host, store_port=store.port, lighthouse_addr=address,
        replica_id=f"replica_{rank}", hostname=host,
        heartbeat_interval=timedelta(seconds=1), init_sync=False, max_retries=0, timeout=_PATIENCE, quorum_timeout=_PATIENCE,
    )  # fmt: skip
    stack.callback(wait_for, "torchft's manager", manager.shutdown)
    return _Quorum(manager, stack)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _reachable(host: str) -> Any:
    """torchft's Gloo, which tells the others to find it by its address: its own way, the host's name, must be in their DNS."""
    from torchft import ProcessGroupGloo

    class Reachable(ProcessGroupGloo):  # type: ignore[misc]
        def get_reconfigure_handle(self) -> str:
            handle = json.loads(super().get_reconfigure_handle())
            port = handle["store"].rpartition(":")[2]
            return json.dumps(handle | {"store": f"{_in_url(host)}:{port}"})

    return Reachable(timeout=_PATIENCE)


def _ddp(model: nn.Module, optimizer: Optimizer) -> Joined:
    """Gradients in every step, in DDP's buckets, the quorum found beside the forward pass; a step counts only if all say so."""
    from torchft import DistributedDataParallel
    from torchft import Optimizer as Committed

    quorum = _meet(asynchronous=True)
    return quorum.joined(DistributedDataParallel(quorum.manager, model), Committed(quorum.manager, optimizer))


def _local_sgd(model: nn.Module, optimizer: Optimizer) -> Joined:
    """Weights averaged after every ``LOCAL_STEPS`` steps, tensor by tensor, concurrently."""
    from torchft.local_sgd import LocalSGD

    quorum = _meet()
    quorum.stack.enter_context(LocalSGD(quorum.manager, model, optimizer, sync_every=LOCAL_STEPS))
    return quorum.joined(model, optimizer)


def diloco(delay: int, mixed: float, every: int = LOCAL_STEPS) -> Callable[[nn.Module, Optimizer], Joined]:
    """What was gained in ``every`` steps is averaged, in one bucket, for an outer optimizer (DiLoCo's: Nesterov, 0.7).

    ``delay``: for how many steps the average may travel while training goes on; ``mixed``: the part of the local weights
    that remains when it has come.
    """

    def join(model: nn.Module, optimizer: Optimizer) -> Joined:
        from torchft.local_sgd import DiLoCo

        quorum, outer = _meet(), SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
        quorum.stack.enter_context(
            DiLoCo(
                quorum.manager, [model], optimizer, outer, sync_every=every, use_bucketization=True,
                fragment_sync_delay=delay, fragment_update_alpha=mixed,
            )
        )  # fmt: skip
        return quorum.joined(model, optimizer)

    return join


def _peer(what: str, join: Callable[[nn.Module, Optimizer], Joined], when: When, period: int = LOCAL_STEPS) -> Peer:
    return Peer(what, join, 1 / period, period, when, "torchft", from_extra("torchft-nightly"), only_gloo=True)


PEERS = {
    "torchft-ddp": _peer("torchft's DDP, which survives lost ranks", _ddp, "joined", period=1),
    "torchft-localsgd": _peer(f"torchft's LocalSGD, an average every {LOCAL_STEPS} steps", _local_sgd, "after"),
    "torchft-diloco": _peer(f"torchft's DiLoCo, an average every {LOCAL_STEPS} steps", diloco(0, 0.0), "after"),
    "torchft-streaming-diloco": _peer(
        f"the same, streaming: an average travels for {LOCAL_STEPS // 2} steps",
        diloco(LOCAL_STEPS // 2, 0.5),
        "overlapped",
    ),
}
