"""Deal: shares dealt out among the ranks like cards, once, so that each holds some of everyone's samples."""

from functools import partial

import torch
from torch import Tensor

from gossamer.comm.ops import permute
from gossamer.comm.runner import Runner, lane_for
from gossamer.comm.topology import shift
from gossamer.data.shares import drawn


def dealt_sizes(sizes: list[int]) -> list[int]:
    """How many samples each rank holds afterwards: the same in total, and more even than before."""
    world = len(sizes)
    hands = [hand_sizes(size, world) for size in sizes]
    return [sum(hands[(rank + hop) % world][hop] for hop in range(world)) for rank in range(world)]


def hand_sizes(size: int, world: int) -> list[int]:
    """A share in ``world`` hands of equal size (±1): hand ``h`` goes to rank − h."""
    return [size // world + (hand < size % world) for hand in range(world)]


def dealt(runner: Runner, rows: Tensor, sizes: list[int], name: str) -> Tensor:
    """The rows that this rank holds after all ranks have dealt out theirs, ``(samples, row_bytes)``, in random order.

    ``sizes``: of all shares; ``name``: what the order depends on. Sends (p−1)/p of a share in p−1 messages. Collective.
    """
    rank, world = runner.rank, runner.world
    hands = rows[drawn(len(rows), f"{name}/hands of {rank}")].split(hand_sizes(len(rows), world))
    largest = max(hand_sizes(size, world)[0] for size in sizes)
    held = [hands[0]]
    for hop in range(1, world):
        message = rows.new_zeros(largest, rows.shape[1])
        message[: len(hands[hop])] = hands[hop]
        flow = partial(permute, message, shift(hop, world))
        came = runner.run(flow, f"the samples dealt out in round {hop}", lane_for(message))
        held.append(came[: hand_sizes(sizes[(rank + hop) % world], world)[hop]])
    mine = torch.cat(held)
    return mine[drawn(len(mine), f"{name}/held by {rank}")]
