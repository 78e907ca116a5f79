"""Horovod: all-reduces of gradients that a thread in the background fuses, over its own Gloo."""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from gossamer.bench.peers.base import Joined, Peer, nothing, wait_for
from gossamer.bench.ranks import of_all, own_address

_GET = (
    "the source distribution (0.28.1) does not compile against today's PyTorch as it is; unpack it, write 17 for 14 in "
    "set(CMAKE_CXX_STANDARD 14) of CMakeLists.txt and horovod/torch/CMakeLists.txt, and, where hosts are not found by their "
    "names (emulated ones are not), gloo_iface_ = global_context.gloo_iface_; as first line of "
    "GlooContext::InitializeForProcessSet in horovod/common/gloo/gloo_context.cc; then HOROVOD_WITH_PYTORCH=1 "
    "HOROVOD_WITH_GLOO=1 HOROVOD_WITHOUT_MPI=1 pip install --no-build-isolation . (needs cmake and g++)"
)


def _horovod(compression: str) -> Callable[[nn.Module, Optimizer], Joined]:
    """``DistributedOptimizer`` with its defaults: a cycle of 1 ms, up to 128 MiB fused; ``compression`` is one of Horovod's.

    Its thread talks to the other ranks in every cycle, so it runs in its own turn only.
    """

    def join(model: nn.Module, optimizer: Optimizer) -> Joined:
        import horovod.torch as hvd

        variables, close = _rendezvous()
        with _running(variables):
            made = hvd.DistributedOptimizer(
                optimizer, model.named_parameters(), compression=getattr(hvd.Compression, compression)
            )

        def turn() -> AbstractContextManager[None]:
            return _running(variables)

        return Joined(model, made, turn=turn, close=close)

    return join


def _rendezvous() -> tuple[dict[str, str], Callable[[], None]]:
    """What Horovod's launcher would put into the environment, with a server in rank 0's process; and how to stop that."""
    from horovod.runner.http.http_server import RendezvousServer

    server: Any = RendezvousServer()
    address, port = of_all((own_address(), server.start() if dist.get_rank() == 0 else 0))[0]
    torchrun = {"RANK": "RANK", "SIZE": "WORLD_SIZE", "LOCAL_RANK": "LOCAL_RANK", "LOCAL_SIZE": "LOCAL_WORLD_SIZE"}
    torchrun |= {"CROSS_RANK": "GROUP_RANK", "CROSS_SIZE": "GROUP_WORLD_SIZE"}
    variables = {f"HOROVOD_{ours}": os.environ[theirs] for ours, theirs in torchrun.items()}
    variables |= {"HOROVOD_HOSTNAME": f"host{os.environ['GROUP_RANK']}", "HOROVOD_CONTROLLER": "gloo"}
    variables |= {"HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_RENDEZVOUS_ADDR": address}
    variables |= {"HOROVOD_GLOO_RENDEZVOUS_PORT": str(port)}
    if "GLOO_SOCKET_IFNAME" in os.environ:
        variables["HOROVOD_GLOO_IFACE"] = os.environ["GLOO_SOCKET_IFNAME"]
    if dist.get_rank() == 0:
        return variables, lambda: wait_for("Horovod's rendezvous server", server.stop)
    return variables, nothing


@contextmanager
def _running(variables: dict[str, str]) -> Iterator[None]:
    import horovod.torch as hvd

    os.environ.update(variables)
    hvd.init()
    yield  # after an error nothing is shut down: that would wait for the other ranks, and the error would not be seen
    wait_for("Horovod's thread", hvd.shutdown)


PEERS = {
    "horovod": Peer("Horovod's DistributedOptimizer", _horovod("none"), 1.0, module="horovod", get=_GET),
    "horovod-fp16": Peer("the same, gradients in fp16", _horovod("fp16"), 0.5, module="horovod", get=_GET),
}
