"""GossipGraD: gossip of the weights and of the optimizer's history, with partners that rotate."""

from dataclasses import dataclass, field, replace

from gossamer.algorithms.cadence import Cadence
from gossamer.algorithms.gossip import Gossip
from gossamer.algorithms.traits import Traits
from gossamer.comm.topology import Dissemination, Topology, rotated
from gossamer.errors import ConfigurationError


@dataclass(frozen=True, kw_only=True)
class GossipGraD(Gossip):
    """As :class:`Gossip`, for the weights and, with ``history``, for what the optimizer remembers of each of them (momentum,
    Adam's moments): both are averaged half and half with one partner per step, and partners are drawn anew every ⌈log2 p⌉
    steps. Second moments stay at zero or above. Averages are added in the form of :class:`Gossip`, which keeps the mean of the
    workers.

    ``late=False``: the average is added before the next update, so the exchange has forward and backward to hide behind.
    ``late=True``: after it, so the optimizer's step hides it as well. Averaging updated weights with a partner's older ones
    would halve the update; here only the difference of what both *sent* is added, so updates keep their full length and
    the learning rate its meaning. Both orders give the same weights, to rounding, where an update does not depend on the
    weights that it is added to (weight decay does, a little) and no history is exchanged.

    Per step one message of the weights' size, and one as large for each thing that the optimizer remembers per weight:
    three in all with Adam, half of that with a 16-bit ``wire``. ``"bf16"`` rather than ``"fp16"``, which second moments are
    too small for.
    History is that of the first step: parameters whose first gradient comes later keep theirs to themselves. Workers whose
    first gradients are of different parameters are told, and need ``history=False``.
    Not the choice if bytes are what is scarce: ``history=False``, or :class:`QuantizedGossip`.

    Source: Daily et al. 2018 (arXiv 1803.05880); the mean-preserving form is ours.
    """

    topology: Topology = field(default_factory=lambda: rotated(Dissemination()))
    history: bool = True
    late: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("history", "late"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigurationError(f"{name} must be True or False; got {getattr(self, name)!r}")
        if self.ahead and self.late:
            raise ConfigurationError("ahead does not go with late=True, where an average is added after the update it foresees")

    @property
    def traits(self) -> Traits:
        return Traits(subject="weights", history=self.history)

    @property
    def cadence(self) -> Cadence:
        return replace(super().cadence, late=self.late)
