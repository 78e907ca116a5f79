"""Correction: links as fast as steps of a known method were, where that differs from what was predicted of it.

A link is measured for a few seconds, and alone. Steps that were taken with plain all-reduce have used it as training does.
"""

from dataclasses import replace

from torch import nn

from gossamer.planning.candidates import Candidate
from gossamer.planning.choose import HIDDEN, Prices
from gossamer.planning.facts import Facts
from gossamer.simulate.run import MakeOptimizer

MOST = 2.0
"""By which factor links are corrected at most, up or down."""

_HALVINGS = 7
"""Of the range of factors, until it is 1 % wide."""


def corrected(facts: Facts, model: nn.Module, make_optimizer: MakeOptimizer, candidate: Candidate, seconds: float) -> Facts:
    """The facts with links at which a step of ``candidate`` is predicted to take as long as it took.

    The step itself is kept, as it needs no prediction any more. Steps that hide the network say nothing of its rate.
    """
    known = replace(facts, steps={**facts.steps, str(candidate): seconds})
    if seconds <= HIDDEN * facts.compute.seconds:
        return known
    low, high = 1 / MOST, MOST
    for _ in range(_HALVINGS):
        middle = (low * high) ** 0.5
        slower = Prices(replace(facts, links=facts.links.scaled(middle)), model, make_optimizer)(candidate)[0] > seconds
        low, high = (middle, high) if slower else (low, middle)
    factor = (low * high) ** 0.5
    return replace(known, links=facts.links.scaled(factor), corrected=factor)
