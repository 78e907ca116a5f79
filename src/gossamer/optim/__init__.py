"""Optimizers: for large batches (LARS, LAMB), for half-precision weights (MasterWeights), and warm-up.

They are ordinary ``torch.optim`` optimizers and know nothing of the network.
"""

from gossamer.optim.lamb import LAMB
from gossamer.optim.lars import LARS
from gossamer.optim.master import MasterWeights
from gossamer.optim.warmup import warmup

__all__ = ["LAMB", "LARS", "MasterWeights", "warmup"]
