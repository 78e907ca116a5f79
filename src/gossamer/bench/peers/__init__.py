"""Peers: what else a user of PyTorch could take, as sides of a comparison; by the names that are typed."""

from collections.abc import Iterable

from gossamer.bench.peers import builtin, gone, hivemind, horovod, torchft, wrapped
from gossamer.bench.peers.base import BASELINE, LOCAL_STEPS, Joined, Peer

PEERS: dict[str, Peer] = builtin.PEERS | wrapped.PEERS | horovod.PEERS | torchft.PEERS | hivemind.PEERS | gone.PEERS

__all__ = ["BASELINE", "LOCAL_STEPS", "PEERS", "Joined", "Peer", "missing"]


def missing(sides: Iterable[str], load: bool = False) -> dict[str, str]:
    """Those of ``sides`` that cannot run in this process, and why. ``load``: import them to find out, which takes seconds."""
    reasons = {side: PEERS[side].missing(load) for side in sides if side in PEERS}
    return {side: reason for side, reason in reasons.items() if reason is not None}
