"""Facts: what a plan is made of: the ranks and their links, what a step computes, and what exchanges compute."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from gossamer.algorithms.base import Algorithm
from gossamer.comm.ops import Group
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import values_of_all
from gossamer.planning.candidates import Candidate
from gossamer.planning.links import Pattern, Rates, Stopwatch, between, measure_rates
from gossamer.planning.local import Exchanged
from gossamer.simulate.profile import Compute
from gossamer.spelled import algorithm_of

MEBI = 2**20


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was measured.

    ``nodes``: the ranks of each machine. ``links``: between machines, or between ranks where there is one machine; ``inside``:
    between ranks of one machine, if there are several machines and any has several ranks. ``exchanges``: by method, what one
    exchange computes, in seconds per MiB of gradients, with all ranks computing; ``patterns``: how it mostly sends.
    """

    nodes: tuple[Group, ...]
    links: Rates
    inside: Rates | None
    compute: Compute
    exchanges: dict[str, float] = field(default_factory=dict)
    patterns: dict[str, Pattern] = field(default_factory=dict)
    noise: float | None = None
    """The gradient noise scale in batches of one worker; None: not known."""
    steps: dict[str, float] = field(default_factory=dict)
    """Seconds of a step by method, where steps of it were taken."""
    corrected: float = 1.0
    """By which factor the links' rates were corrected because of these steps."""
    seconds: float = 0.0
    """What measuring took."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return sum(map(len, self.nodes))


def measure(
    runner: Runner, compute: Compute, candidates: Sequence[Candidate], device: torch.device, noise: float | None = None
) -> Facts:
    """Measure links, and what exchanges compute, in at most ten seconds. Collective, while nothing else is under way."""
    nodes = nodes_of(runner)
    watch = Stopwatch(runner, device=device)
    begin, shared = watch.left, len(nodes) > 1 and max(map(len, nodes)) > 1
    everyone = (tuple(range(runner.world)),)
    groups = between(nodes) if shared else everyone
    links = measure_rates(runner, groups, watch, "between machines" if len(nodes) > 1 else "between ranks")
    several = tuple(node for node in nodes if len(node) > 1)
    inside = measure_rates(runner, several, watch, "inside machines") if shared else None
    exchanges, patterns = _exchanges(runner, nodes, candidates, watch, device)
    return Facts(
        nodes=nodes,
        links=links,
        inside=inside,
        compute=compute,
        exchanges=exchanges,
        patterns=patterns,
        noise=noise,
        seconds=begin - watch.left,
    )


def _exchanges(
    runner: Runner, nodes: tuple[Group, ...], candidates: Sequence[Candidate], watch: Stopwatch, device: torch.device
) -> tuple[dict[str, float], dict[str, Pattern]]:
    """All ranks compute at the same time, as they do in training; the slowest rank counts."""
    own: dict[str, float] = {}
    patterns: dict[str, Pattern] = {}

    def compute() -> None:
        for method, algorithm in _computing(candidates):
            exchanged = Exchanged(algorithm, runner.world, nodes, device)
            own[method], patterns[method] = exchanged.best_of(2, runner.now), exchanged.pattern

    watch.time(compute, "what exchanges compute")
    everyone = values_of_all(runner, own)
    return {method: max(each[method] for each in everyone) for method in own}, patterns


def _computing(candidates: Sequence[Candidate]) -> Iterator[tuple[str, Algorithm]]:
    for method in dict.fromkeys(each.computes for each in candidates):
        yield method, algorithm_of(method)


def nodes_of(runner: Runner) -> tuple[Group, ...]:
    """The ranks of each machine."""
    return runner.nodes or tuple((rank,) for rank in range(runner.world))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients of a model."""
    return sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
