"""Line: the bits per second that plain TCP sockets reach from each rank, in the run that the lines are compared in."""

import math
import os
from collections.abc import Sequence

import torch.distributed as dist

from gossamer.bench.ranks import of_all
from gossamer.lab.line_rate import lab_addresses, line_rate
from gossamer.lab.rates import parse_rate

REPEATS = 3


def plain_tcp() -> list[list[float]]:
    """For every rank, what its line reached in each repeat; empty outside of the lab. Collective.

    Around a ring everyone waits for the slowest line. So there is one ring for every rate that some host has: of the
    hosts which have it or a higher one. A host that is alone with its rate sends all it has over the line of another, and
    gets that one's.
    """
    if "GOSSAMER_LAB" not in os.environ or dist.get_world_size() == 1:
        return []
    rates = of_all(parse_rate(os.environ.get("GOSSAMER_LAB_RATE", "unshaped")).bps or math.inf)
    lines: list[list[float]] = [[] for _ in rates]
    for members in rings(rates):
        reached = _ring(members, min(rates[rank] for rank in members))
        for rank in members:
            lines[rank] = reached
    return lines


def rings(rates: Sequence[float]) -> list[list[int]]:
    """Ranks of every ring, that of all ranks first: those whose rate is at least one that some rank has."""
    groups = [[rank for rank, each in enumerate(rates) if each >= rate] for rate in sorted(set(rates))]
    return [members for members in groups if len(members) > 1]


def _ring(members: Sequence[int], rate: float) -> list[float]:
    """Bits per second of each repeat around a ring of ``members``, told to all ranks."""
    rank, addresses = dist.get_rank(), lab_addresses()
    reached: list[float] = []
    if rank in members:
        nbytes = round(min(max(rate / 8 * 0.5, 1e6), 16e6))  # half a second
        own = [addresses[member] for member in members]
        seconds = line_rate(members.index(rank), len(members), own, "ring", nbytes, REPEATS)
        reached = [8 * nbytes / each for each in seconds]
    return of_all(reached)[members[0]]
