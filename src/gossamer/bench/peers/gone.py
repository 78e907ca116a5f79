"""Gone: what was an alternative, and cannot be installed beside today's PyTorch."""

from torch import nn
from torch.optim import Optimizer

from gossamer.bench.peers.base import Joined, Peer
from gossamer.errors import ConfigurationError


def _gone(what: str, why: str) -> Peer:
    def join(model: nn.Module, optimizer: Optimizer) -> Joined:
        raise ConfigurationError(why)

    return Peer(what, join, None, gone=why)


PEERS = {
    "bagua": _gone(
        "BAGUA, from which several of gossamer's algorithms come",
        "its last release (0.9.2) does not build without nvcc and NCCL, and its core moves tensors of GPUs only; ByteGrad(), "
        "QSGD(), DecentralizedSGD(), LowPrecisionDecentralized() and QAdam() are its methods",
    ),
    "bluefog": _gone(
        "BlueFog, decentralized training over MPI",
        "its last release (0.3.0) does not build against today's PyTorch: setup.py asks for C++14, the headers for C++17",
    ),
}
