"""Peers: what else a user of PyTorch could take, as sides of a comparison; by the names that are typed."""

from gossamer.bench.peers import builtin, gone, hivemind, horovod, torchft, wrapped
from gossamer.bench.peers.base import LOCAL_STEPS, Joined, Peer

PEERS: dict[str, Peer] = builtin.PEERS | wrapped.PEERS | horovod.PEERS | torchft.PEERS | hivemind.PEERS | gone.PEERS

__all__ = ["LOCAL_STEPS", "PEERS", "Joined", "Peer"]
