"""Bound: the least time that a step can take, from measured compute and a measured line. No simulator is involved.

*Compute* is that of the slowest host: sides are timed from barrier to barrier, and so is the side that does not
communicate. *Wire* is that of the rank which takes longest to send its own payload over its own line, both as measured:
of a symmetric method the one behind a slow link. What a rank receives is not counted, and none sends more than it must.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gossamer.bench.clock import clock_for
from gossamer.bench.workload import Workload

When = Literal["joined", "overlapped", "after"]
"""When a side's exchange may travel: from a gradient's readiness to the optimizer's step; beside all of the compute; or only
between the optimizer's step and the next forward pass, while nothing is computed."""


@dataclass(frozen=True, slots=True)
class Ready:
    """When gradients come in a step of ``step`` seconds without communication: seconds from its start, and each one's
    share of all bytes."""

    seconds: tuple[float, ...]
    shares: tuple[float, ...]
    step: float

    def within(self, step: float) -> "Ready":
        """The same in a step of that many seconds."""
        return Ready(tuple(seconds * step / self.step for seconds in self.seconds), self.shares, step)


def measure_ready(workload: Workload, seed: int = 0, repeats: int = 5) -> Ready:
    """Watch the gradients of a fresh model come; medians over ``repeats`` steps after one that is not counted."""
    torch.manual_seed(0)
    model, generator = workload.build_model(), torch.Generator().manual_seed(seed)
    optimizer = workload.build_optimizer(model)
    clock = clock_for(next(model.parameters()).device)
    noted: dict[int, Any] = {}
    came: dict[int, list[float]] = {}
    steps = []

    def note(parameter: torch.Tensor) -> None:
        noted[id(parameter)] = clock.now()

    parameters = {id(p): p for p in model.parameters() if p.requires_grad}
    handles: list[Any] = [p.register_post_accumulate_grad_hook(note) for p in parameters.values()]
    for _ in range(repeats + 1):
        inputs, targets = workload.random_batch(generator)
        optimizer.zero_grad()
        clock.finish()
        noted.clear()
        begin = clock.now()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        end = clock.now()
        clock.finish()
        steps.append(clock.seconds(begin, end))
        for key, moment in noted.items():
            came.setdefault(key, []).append(clock.seconds(begin, moment))
    for handle in handles:
        handle.remove()
    order = sorted((statistics.median(times[1:] or times), parameters[key].nbytes) for key, times in came.items())
    whole = sum(nbytes for _, nbytes in order)
    step = statistics.median(steps[1:])
    return Ready(tuple(seconds for seconds, _ in order), tuple(nbytes / whole for _, nbytes in order), step)


def wire(payloads: Sequence[float], lines: Sequence[float]) -> float:
    """Seconds until the last rank has sent its bytes per step over its line of so many bits per second."""
    return max(8 * payload / line for payload, line in zip(payloads, lines, strict=True))


def least(when: When, compute: float, wire: float, ready: Ready) -> float:
    """Seconds that a step takes at least, by when its exchange may travel. ``ready``: of a step of any length."""
    if when == "overlapped":
        return overlapped(compute, wire)
    return after(compute, wire) if when == "after" else joined(compute, wire, ready.within(compute))


def after(compute: float, wire: float) -> float:
    """Seconds of a step if the exchange begins when the optimizer has stepped, and the next step waits for its end."""
    return compute + wire


def overlapped(compute: float, wire: float) -> float:
    """Seconds of a step if everything that can overlaps: compute and wire side by side."""
    return max(compute, wire)


def joined(compute: float, wire: float, ready: Ready) -> float:
    """Seconds of a step if the exchange of a gradient begins when it is there, and all end before the next update.

    The largest, over gradients, of when it is ready plus the wire of it and all later ones; or the compute. What is sent is
    taken to be spread over the gradients by their size.
    """
    ends = [seconds + wire * later for seconds, later in zip(ready.seconds, _later(ready.shares), strict=True)]
    return max([compute, *ends])


def _later(shares: Sequence[float]) -> list[float]:
    """For each share, itself and all that come later."""
    total, result = 0.0, []
    for share in reversed(shares):
        total += share
        result.append(total)
    return result[::-1]
