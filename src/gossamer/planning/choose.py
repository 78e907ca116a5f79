"""Choose: the predicted step of every candidate, what limits it, and which one is taken, with the reason."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from torch import nn

from gossamer.planning.candidates import FIDELITIES, MOST_STEPS, Candidate, Fidelity, within
from gossamer.planning.facts import MEBI, Facts, gradient_bytes
from gossamer.simulate.prediction import StepTime, step_time
from gossamer.simulate.run import MakeOptimizer

PLAIN = "AllReduce()"
"""What the others are compared with: what DDP does takes as long."""

MARGIN = 0.03
"""By which share of the predicted time a less exact method must be faster."""

HIDDEN = 1.03
"""Up to how many times what is computed a step is limited by that."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a plan. ``ratio``: of the step to that of plain all-reduce. ``steps``: how many times more it is predicted to
    need for the same quality, in words; ``slower``: the factor that the choice counts with."""

    method: str
    fidelity: Fidelity
    step_seconds: float
    ratio: float
    limit: str
    steps: str
    slower: float
    overlap_forward: bool = False
    evidence: str = ""

    @property
    def seconds(self) -> float:
        """Predicted time to the same quality, in steps of plain all-reduce."""
        return self.step_seconds * self.slower

    def __str__(self) -> str:
        return f"{self.method}, overlap_forward=True" if self.overlap_forward else self.method


Price = Callable[[Candidate], tuple[float, str]]
"""The predicted step of a candidate in seconds, and what limits it."""


def rows(candidates: Sequence[Candidate], price: Price) -> list[Row]:
    """Every candidate's, in their order."""
    priced = [(each, *price(each)) for each in candidates]
    plain, _ = price(Candidate(method=PLAIN, fidelity="exact"))
    return [
        Row(
            method=each.method,
            fidelity=each.fidelity,
            step_seconds=seconds,
            ratio=seconds / plain,
            limit=limit,
            steps="unknown" if each.steps is None else str(each.steps),
            slower=MOST_STEPS[each.fidelity] if each.steps is None else each.steps.estimate,
            overlap_forward=each.overlap_forward,
            evidence=each.evidence,
        )
        for each, seconds, limit in priced
    ]


def choose(
    found: Sequence[Row],
    fidelity: Fidelity,
    overlap_forward: bool = False,
    taken: Collection[str] = (),
    only_taken: bool = False,
) -> Row:
    """The least time to the same quality; within 3 % of it a method of which steps were ``taken``, then the most exact.

    Of the methods in this class, or more exact, with ``overlap_forward`` or without it, which changes what a script may do with
    gradients. ``only_taken``: of those whose steps were taken.
    """
    found = [row for row in _compared(found, fidelity, overlap_forward) if not only_taken or str(row) in taken]
    least = min(row.seconds for row in found)
    near = [row for row in found if row.seconds <= (1 + MARGIN) * least]
    return min(near, key=lambda row: (str(row) not in taken, FIDELITIES.index(row.fidelity)))


def ranked(found: Sequence[Row]) -> list[Row]:
    """By predicted time to the same quality."""
    return sorted(found, key=lambda row: row.seconds)


def _compared(found: Sequence[Row], fidelity: Fidelity, overlap_forward: bool) -> list[Row]:
    return [row for row in found if row.overlap_forward == overlap_forward and within(row.fidelity, fidelity)]


def why(chosen: Row, found: Sequence[Row], fidelity: Fidelity, compute_seconds: float) -> str:
    """The reason of the choice, in a sentence."""
    found = _compared(found, fidelity, chosen.overlap_forward)
    plain = next(row for row in found if row.method == PLAIN)
    best = min(found, key=lambda row: row.seconds)
    told = f"{_ms(chosen.step_seconds)} a step are predicted, {_ms(compute_seconds)} of them computed"
    if chosen is plain:
        if plain.step_seconds <= HIDDEN * compute_seconds:
            return f"plain all-reduce is right: the network costs next to nothing ({told})"
        rest = f"the fastest, {best}, would gain {100 * (1 - best.seconds / plain.seconds):.0f} %"
        return f"plain all-reduce is right: no candidate is more than 3 % faster ({told}; {rest})"
    gain = f"{chosen.ratio:.2f} of plain all-reduce"
    near = "" if best is chosen else f"; {best} is within 3 %, and less exact or less plain"
    return f"{told}, {gain}; limited by {chosen.limit}{near}"


def tried(row: Row, best: Row, chosen: Row) -> str:
    """The reason of a choice after steps of ``row`` were taken; ``best``: what was the best until then."""
    took = f"took {_ms(row.step_seconds)} in a step, and {_ms(best.step_seconds)} with {best.method}"
    if chosen == row:
        return f"on trial it {took}"
    if row.seconds < best.seconds and chosen != best:
        return f"{_ms(chosen.step_seconds)} a step are predicted; {row.method} {took}"
    return f"{row.method} was predicted to be faster, and {took}"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.4g} ms"


class Prices:
    """Predicts the step of candidates for a model on what was measured."""

    def __init__(self, facts: Facts, model: nn.Module, make_optimizer: MakeOptimizer) -> None:
        self._facts, self._model, self._make = facts, model, make_optimizer
        self._size = gradient_bytes(model) / MEBI

    def __call__(self, candidate: Candidate) -> tuple[float, str]:
        facts = self._facts
        found, latency = self._predicted(candidate)
        if str(candidate) in facts.steps:
            seconds = facts.steps[str(candidate)]
            return seconds, "compute" if seconds <= HIDDEN * facts.compute.seconds else "bandwidth"
        computes = facts.exchanges.get(candidate.computes, 0.0) * self._size * candidate.share
        busy = facts.compute.seconds + computes
        if max(found.step_seconds, busy) <= HIDDEN * facts.compute.seconds:
            return max(found.step_seconds, busy), "compute"
        if busy > found.step_seconds:
            return busy, "encoding and averaging"
        rounds = found.messages_per_step * latency
        return found.step_seconds, "latency" if rounds > found.wire_seconds else "bandwidth"

    def _predicted(self, candidate: Candidate) -> tuple[StepTime, float]:
        """The prediction, and the latency of the link that it was made with."""
        facts, pattern = self._facts, self._facts.patterns.get(candidate.computes, "ring")
        link = getattr(facts.links, pattern).link
        inside = None if facts.inside is None else getattr(facts.inside, pattern).link
        found = step_time(
            self._model,
            candidate.algorithm,
            world=facts.world,
            link=link,
            compute=facts.compute,
            optimizer=self._make,
            steps=4,
            warmup=1,
            ranks_per_node=1 if inside is None else max(map(len, facts.nodes)),
            inside=inside,
            overlap_forward=candidate.overlap_forward,
        )
        return found, link.latency
