"""Groups: which workers share a node, and which of them speaks for the others."""

from collections.abc import Sequence

from gossamer.comm.ops import Context, Group


def machines_of(ctx: Context, ranks_per_node: int | None) -> tuple[Group, ...]:
    """The workers of each machine."""
    if ranks_per_node is None:
        return ctx.machines
    return consecutive(ctx.world, ranks_per_node)


def consecutive(world: int, ranks_per_node: int) -> tuple[Group, ...]:
    """Machines of so many ranks each, one after the other."""
    ranks = range(world)
    return tuple(tuple(ranks[first : first + ranks_per_node]) for first in range(0, world, ranks_per_node))


def machine(ctx: Context, machines: Sequence[Group]) -> Group:
    """The workers of this worker's machine."""
    return next(group for group in machines if ctx.rank in group)


def leaders_of(machines: Sequence[Group]) -> Group:
    """The first worker of each machine."""
    return tuple(sorted(group[0] for group in machines))
