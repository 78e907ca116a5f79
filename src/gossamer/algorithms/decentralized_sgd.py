"""DecentralizedSGD: average the weights with both neighbours on a ring."""

from dataclasses import dataclass, field

from gossamer.algorithms.gossip import Gossip
from gossamer.codecs.wire import Wire
from gossamer.comm.topology import Ring, Topology


@dataclass(frozen=True, kw_only=True)
class DecentralizedSGD(Gossip):
    """BAGUA's D_FP_S: weights in full precision, averaged with the neighbours on a ring (thirds).

    ``topology=RandomMatching()`` is its "random", ``ShiftOne()`` its shift-one, ``Complete()`` its "all"; ``every`` lets
    local steps pass between two averages.

    Per exchange two messages of the weights' size. Not the choice for many workers: an update needs p/2 steps around a ring,
    and ⌈log2 p⌉ with :class:`Gossip`.

    Source: Lian et al. 2017 (arXiv 1705.09056); Gan et al. 2021 (arXiv 2107.01499).
    """

    wire: Wire = "fp32"
    topology: Topology = field(default_factory=Ring)
