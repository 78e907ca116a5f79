"""gossamer: data-parallel PyTorch training that does not wait for a slow network."""

from gossamer._version import __version__
from gossamer.algorithms import Algorithm, AllReduce, Gossip
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
    "Algorithm",
    "AllReduce",
    "CommunicationError",
    "CommunicationTimeout",
    "ConfigurationError",
    "DisagreementError",
    "GossamerError",
    "Gossip",
    "PeerLeftError",
    "Replica",
    "UsageError",
    "__version__",
    "loopback",
    "replicate",
]
