"""gossamer: data-parallel PyTorch training that does not wait for a slow network."""

from gossamer._version import __version__
from gossamer.algorithms import (
    QSGD,
    Algorithm,
    AllReduce,
    ByteGrad,
    ChunkSparse,
    DDPHook,
    DecentralizedSGD,
    Gossip,
    GossipGraD,
    GossipPGA,
    Hierarchical,
    LowPrecisionDecentralized,
    PowerSGD,
    PushSum,
    QuantizedGossip,
    ScatterReduce,
    after,
    by_size,
    in_parts,
)
from gossamer.comm.loopback import loopback
from gossamer.errors import (
    CommunicationError,
    CommunicationTimeout,
    ConfigurationError,
    DisagreementError,
    GossamerError,
    PeerLeftError,
    UsageError,
)
from gossamer.replica import Replica
from gossamer.replicate import replicate

__all__ = [
    "QSGD",
    "Algorithm",
    "AllReduce",
    "ByteGrad",
    "ChunkSparse",
    "CommunicationError",
    "CommunicationTimeout",
    "ConfigurationError",
    "DDPHook",
    "DecentralizedSGD",
    "DisagreementError",
    "GossamerError",
    "Gossip",
    "GossipGraD",
    "GossipPGA",
    "Hierarchical",
    "LowPrecisionDecentralized",
    "PeerLeftError",
    "PowerSGD",
    "PushSum",
    "QuantizedGossip",
    "Replica",
    "ScatterReduce",
    "UsageError",
    "__version__",
    "after",
    "by_size",
    "in_parts",
    "loopback",
    "replicate",
]
