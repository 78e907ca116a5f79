"""Levels: where each worker is, and the link of every level of a cluster, the outermost first."""

from functools import lru_cache

import numpy as np

from gossamer.algorithms.blocks.node_groups import consecutive
from gossamer.comm.ops import Group
from gossamer.simulate.cluster import Cluster
from gossamer.simulate.profile import Link
from gossamer.simulate.sharing import Members, Ranks


class Levels:
    """The workers of a cluster: sites and machines, by worker, and the links across, between and inside them."""

    def __init__(self, cluster: Cluster, nodes: tuple[Group, ...], between: Link | None = None) -> None:
        """``nodes``: the workers of each machine. ``between``: another link between machines than the cluster's."""
        self.nodes, self.world = nodes, sum(map(len, nodes))
        machines = np.repeat(np.arange(len(nodes)), [len(node) for node in nodes])
        levels: tuple[Ranks, ...] = (machines,)
        self.links: tuple[Link, ...] = between or cluster.between, cluster.inside or Link()
        if cluster.across is not None:
            per_site = cluster.machines.count // cluster.machines.sites
            levels, self.links = (machines // per_site, machines), (cluster.across, *self.links)
        self._everyone = tuple(range(self.world))
        self._all = Members(levels)
        self.members_of = lru_cache(maxsize=1024)(self._members)

    def members(self, group: Group) -> Members:
        """Where the members of a group are."""
        if group is self._everyone:
            return self._all
        if group == self._everyone:
            self._everyone = group  # known by its identity from now on: thousands of ranks take long to compare
            return self._all
        return self.members_of(group)

    def _members(self, group: Group) -> Members:
        ranks = np.array(group)
        return Members(tuple(level[ranks] for level in self._all.levels))


def nodes_of(cluster: Cluster) -> tuple[Group, ...]:
    """The workers of each machine."""
    return consecutive(cluster.world, cluster.machines.devices)
