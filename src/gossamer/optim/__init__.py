"""Optimizers: for large batches (LARS, LAMB), half-precision weights (MasterWeights), averaged weights (GossipAdamW), warm-up;
and 1-bit Adam.

All are ordinary ``torch.optim`` optimizers, and all but the last know nothing of the network; GossipAdamW is told how many
workers' weights are averaged.
"""

from gossamer.optim.gossip_adamw import GossipAdamW
from gossamer.optim.lamb import LAMB
from gossamer.optim.lars import LARS
from gossamer.optim.master import MasterWeights
from gossamer.optim.one_bit_adam import OneBitAdam, QAdam
from gossamer.optim.warmup import warmup

__all__ = ["LAMB", "LARS", "GossipAdamW", "MasterWeights", "OneBitAdam", "QAdam", "warmup"]
