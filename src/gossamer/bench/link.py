"""Link: the bits per second that plain TCP sockets reach from each rank, in the run whose methods are compared."""

import contextlib
import math
import os
import socket
from collections.abc import Sequence
from random import SystemRandom

import torch.distributed as dist

from gossamer.bench.ranks import of_all, own_address
from gossamer.lab.line_rate import lab_addresses, line_rate
from gossamer.lab.rates import parse_rate

REPEATS = 3


def plain_tcp() -> list[list[float]]:
    """For every rank, what its link reached in each repeat. Collective.

    Empty where ranks of a host share a link, where a host refuses connections to its ports from 20000 to 30000 or has no IPv4
    address, and over another backend than Gloo. It is what one connection each way reaches, which may not fill a link of tens
    of Gbit/s, or a long one.

    Around a ring all ranks wait for the slowest link. So there is one ring for every rate that a host has: of the hosts with
    this or a higher one. A host that is alone with its rate sends over the link of another, and gets that one's.
    """
    hosts, world = dist.get_world_size() // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_world_size()
    if world == 1 or dist.get_backend() != "gloo" or (hosts not in (1, world) and "GOSSAMER_LAB" not in os.environ):
        return []
    rates = of_all(parse_rate(os.environ.get("GOSSAMER_LAB_RATE", "unshaped")).bps or math.inf)
    links: list[list[float]] = [[] for _ in rates]
    for members in rings(rates):
        reached = _ring(members, min(rates[rank] for rank in members))
        for rank in members:
            links[rank] = reached
    return links if all(links) else []


def rings(rates: Sequence[float]) -> list[list[int]]:
    """Ranks of every ring, that of all ranks first: those whose rate is at least one that some rank has."""
    groups = [[rank for rank, each in enumerate(rates) if each >= rate] for rate in sorted(set(rates))]
    return [members for members in groups if len(members) > 1]


def _ring(members: Sequence[int], rate: float) -> list[float]:
    """Bits per second of each repeat around a ring of ``members``, told to all ranks; empty if they cannot connect."""
    rank, addresses = dist.get_rank(), _addresses()
    if not all(addresses):
        return []
    port = of_all(_DICE.randrange(*_PORTS))[0]  # another launch may be measuring on this machine
    reached: list[float] = []
    if rank in members:
        nbytes = round(min(max(rate / 8 * 0.5, 1e6), 16e6))  # half a second
        own = [addresses[member] for member in members]
        with contextlib.suppress(OSError):
            seconds = line_rate(members.index(rank), len(members), own, "ring", nbytes, REPEATS, port=port)
            reached = [8 * nbytes / each for each in seconds]
    found = of_all(reached)
    return found[members[0]] if all(found[member] for member in members) else []


_PORTS, _DICE = (20000, 29000), SystemRandom()
"""Ports that systems do not give to connections by themselves, and what chooses among them: no seed is touched."""


def _addresses() -> list[str]:
    """The IPv4 addresses of all ranks: outside of the lab, those by which each reaches the first, empty if there is none."""
    if "GOSSAMER_LAB" in os.environ:
        return lab_addresses()
    own = ""
    with contextlib.suppress(OSError):
        own = own_address(socket.AF_INET)
    return of_all(own)
