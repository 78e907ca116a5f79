"""Peers: what else a user of PyTorch could take, as methods of a comparison; by the names that are typed."""

from collections.abc import Iterable

from gossamer.bench.peers import builtin, gone, hivemind, horovod, torchft, wrapped
from gossamer.bench.peers.base import BASELINE, LOCAL_STEPS, Joined, Peer

PEERS: dict[str, Peer] = builtin.PEERS | wrapped.PEERS | horovod.PEERS | torchft.PEERS | hivemind.PEERS | gone.PEERS

__all__ = ["BASELINE", "LOCAL_STEPS", "PEERS", "Joined", "Peer", "missing"]


def missing(methods: Iterable[str], load: bool = False) -> dict[str, str]:
    """Those of ``methods`` that cannot run in this process, and why. ``load``: import them to find out, which takes seconds."""
    reasons = {method: PEERS[method].missing(load) for method in methods if method in PEERS}
    return {method: reason for method, reason in reasons.items() if reason is not None}
