"""Context: what a flow may know."""

from dataclasses import dataclass

from gossamer.comm.ops import Group


@dataclass(frozen=True, slots=True)
class Context:
    """What a flow may know: the step, and the members of this step's epoch.

    ``members`` are stable ids, not a fixed world: they may change between steps, never within a flow.
    ``rank`` is this worker's index among them; ``nodes`` says which indices share a machine (each its own if unknown).
    ``overtakes``: some buckets are needed while longer ones are under way (``overlap_forward``).
    """

    step: int
    rank: int
    members: tuple[int, ...]
    nodes: tuple[Group, ...] | None = None
    overtakes: bool = False

    @property
    def world(self) -> int:
        """Number of members."""
        return len(self.members)

    @property
    def machines(self) -> tuple[Group, ...]:
        """The indices of each machine's members."""
        return self.nodes if self.nodes is not None else tuple((rank,) for rank in range(self.world))

    def seed(self, *what: int) -> int:
        """A number for this step, this worker and ``what`` else: below 2^63, for codecs that round at random.

        Another one for every worker there is, also where this one is among those of its machine only; and for one that
        leads its machine another one there than among the leaders, even of two.
        """
        value = 0x9E3779B97F4A7C15
        for part in (self.step, self.members[self.rank], self.members[-1], *what):
            value = ((value ^ part) * 0xBF58476D1CE4E5B9) % 2**64
            value ^= value >> 29
        return value >> 1
