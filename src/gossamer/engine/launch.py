"""Launch: in which order buckets leave, where what is needed first may overtake what was there first."""

from collections.abc import Sequence

import torch

from gossamer.bucket_plan import Layout
from gossamer.comm.ops import all_reduce, broadcast
from gossamer.comm.runner import Runner, lane_for
from gossamer.memory import on_host

PROBE_BYTES = 4 * 2**20
"""At most so much is sent to measure the line."""


def launch_order(ready: Sequence[float], seconds: Sequence[float], needs: Sequence[float]) -> list[int]:
    """In which order to launch buckets: whenever the link is free, the one of the complete buckets that is needed first.

    ``ready``: when each one is complete, in seconds from the first; ``seconds``: how long each takes on the line;
    ``needs``: the place in the forward pass of the first module that waits for it.
    """
    left, order, now = set(range(len(ready))), [], 0.0
    while left:
        there = [index for index in left if ready[index] <= now] or [min(left, key=lambda index: (ready[index], index))]
        chosen = min(there, key=lambda index: (needs[index], index))
        now = max(now, ready[chosen]) + seconds[chosen]
        order.append(chosen)
        left.remove(chosen)
    return order


def agreed_order(
    runner: Runner, layouts: Sequence[Layout], ready: Sequence[float], needs: Sequence[int], sent_share: float
) -> list[int]:
    """The order of :func:`launch_order` as rank 0 sees it, after the line was measured. Collective.

    ``ready``: when each bucket was complete, in seconds of any clock; ``sent_share``: bytes sent per byte of gradient.
    """
    per_byte = _measured_line(runner, layouts) * sent_share
    order = launch_order([moment - min(ready) for moment in ready], [per_byte * layout.nbytes for layout in layouts], needs)
    mine = torch.tensor(order, dtype=torch.int64)
    agreed = runner.run(lambda: broadcast(mine), "the order in which buckets are launched")
    return list(map(int, agreed))


def _measured_line(runner: Runner, layouts: Sequence[Layout]) -> float:
    """Seconds per byte that a rank sends, with nothing else on the line."""
    nbytes = min(PROBE_BYTES, max(layout.nbytes for layout in layouts))
    message = torch.zeros(nbytes // 4 + 1, device=layouts[0].device)
    begin = 0.0
    for _ in range(2):  # ranks do not come to the first one together
        begin = runner.now()
        runner.run(lambda: all_reduce(message), "a measure of the line", lane_for(message))
        if not on_host(message):
            torch.accelerator.synchronize(message.device)
    return (runner.now() - begin) / (2 * (runner.world - 1) / runner.world * message.nbytes)
