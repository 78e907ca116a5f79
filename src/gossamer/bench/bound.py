"""Bound: the least time that a step can take, from measured compute and a measured link. No simulator is involved.

*Compute* is that of the slowest host: methods are timed from barrier to barrier, and so is the method that does not
communicate. *Wire* is that of the rank which takes longest to send its own payload over its own link, both as measured. For
a symmetric method that is the rank with the slowest link. What a rank receives is not counted, and none sends more than it
must.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from gossamer.bench.clock import clock_for
from gossamer.bench.workload import Workload

When = Literal["joined", "layered", "overlapped", "after"]
"""When a method's exchange may travel: from a gradient's readiness to the optimizer's step, or to the next use of its layer;
beside all of the compute; or only between the optimizer's step and the next forward pass, while nothing is computed."""


@dataclass(frozen=True, slots=True)
class Ready:
    """When gradients come in a step of ``step`` seconds without communication: seconds from its start, each one's share of
    all bytes, and the seconds at which the forward pass comes to their parameters."""

    seconds: tuple[float, ...]
    shares: tuple[float, ...]
    step: float
    used: tuple[float, ...]

    def within(self, step: float) -> "Ready":
        """The same in a step of that many seconds."""
        factor = step / self.step
        return Ready(
            tuple(seconds * factor for seconds in self.seconds), self.shares, step, tuple(each * factor for each in self.used)
        )


def measure_ready(workload: Workload, seed: int = 0, repeats: int = 5, *, forward: bool = False) -> Ready:
    """Watch the gradients of a fresh model come; medians over ``repeats`` steps after one that is not counted.

    With ``forward`` also when their parameters are used: when the module that holds them is called. It costs a compiled
    model a break of its graph at each module, as overlapping the forward pass itself does, so it is done only where a bound
    asks for it. Of a parameter of which nobody knows when it is used (not watched, scripted, or taken by a module that does
    not hold it) it is when the gradient is there, at the latest: a bound may be too low, and must not be too high.
    """
    torch.manual_seed(0)
    model, generator = workload.build_model(), torch.Generator().manual_seed(seed)
    optimizer = workload.build_optimizer(model)
    clock = clock_for(next(model.parameters()).device)
    noted: dict[int, Any] = {}
    called: dict[int, Any] = {}
    watched: dict[int, list[tuple[float, float]]] = {}
    steps = []

    def note(parameter: torch.Tensor) -> None:
        noted[id(parameter)] = clock.now()

    def call(module: torch.nn.Module, inputs: Any) -> None:
        own = [id(parameter) for parameter in module.parameters(recurse=False) if id(parameter) not in called]
        if own:
            called.update(dict.fromkeys(own, clock.now()))

    call._torchdynamo_disable = True  # type: ignore[attr-defined]  # what torch.compiler.disable sets
    parameters = {id(p): p for p in model.parameters() if p.requires_grad}
    handles: list[Any] = [p.register_post_accumulate_grad_hook(note) for p in parameters.values()]
    if forward:
        plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]  # those take no hooks
        handles += [module.register_forward_pre_hook(call) for module in plain]
    for _ in range(repeats + 1):
        inputs, targets = workload.random_batch(generator)
        optimizer.zero_grad()
        clock.finish()
        noted.clear()
        called.clear()
        begin = clock.now()
        workload.loss(model(inputs), targets).backward()
        optimizer.step()
        end = clock.now()
        clock.finish()
        steps.append(clock.seconds(begin, end))
        for key, moment in noted.items():
            use_and_arrival = clock.seconds(begin, called.get(key, moment)), clock.seconds(begin, moment)
            watched.setdefault(key, []).append(use_and_arrival)
    for handle in handles:
        handle.remove()
    order = []
    for key, moments in watched.items():
        used, came = map(statistics.median, zip(*(moments[1:] or moments), strict=True))
        order.append((came, parameters[key].nbytes, used))
    order.sort()
    whole = sum(nbytes for _, nbytes, _ in order)
    came, shares, used = zip(*((came, nbytes / whole, used) for came, nbytes, used in order), strict=True)
    return Ready(came, shares, statistics.median(steps[1:]), used)


def wire(payloads: Sequence[float], links: Sequence[float]) -> float:
    """Seconds until the last rank has sent its bytes per step over its link of so many bits per second."""
    return max(8 * payload / link for payload, link in zip(payloads, links, strict=True))


def least(when: When, compute: float, wire: float, ready: Ready) -> float:
    """Seconds that a step takes at least, by when its exchange may travel. ``ready``: of a step of any length."""
    if when in ("layered", "overlapped"):
        return overlapped(compute, wire)
    return after(compute, wire) if when == "after" else joined(compute, wire, ready.within(compute))


def after(compute: float, wire: float) -> float:
    """Seconds of a step if the exchange begins when the optimizer has stepped, and the next step waits for its end."""
    return compute + wire


def overlapped(compute: float, wire: float) -> float:
    """Seconds of a step if everything that can overlaps: compute and wire side by side."""
    return max(compute, wire)


def layered(compute: float, wire: float, ready: Ready) -> float:
    """Seconds of a step if the exchange of a gradient begins when it is there, and ends before its layer is used again.

    More than :func:`overlapped`, because a layer that waits for its exchange does not compute. Of any layer, and those whose
    gradients come no earlier and that are used again no later (in front of it), all must travel between its gradient and its
    next use: the step is at least what passes from the use to the gradient, plus the wire of all of these. No schedule takes
    less that exchanges every gradient in every step, computes layer by layer, and uses no layer in parts.
    """
    ready = ready.within(compute)
    layers = list(zip(ready.seconds, ready.used, ready.shares, strict=True))
    turns = [
        came - used + wire * sum(share for other, before, share in layers if other >= came and before <= used)
        for came, used, _ in layers
    ]
    return max([overlapped(compute, wire), *turns])


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
