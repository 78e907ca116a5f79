"""Links that were measured wrong are corrected by the steps that were taken, and the choice is that of right ones."""

from dataclasses import replace

import pytest
from torch import nn

from gossamer.planning.candidates import Candidate, candidates
from gossamer.planning.choose import PLAIN, Prices
from gossamer.planning.correction import corrected
from gossamer.planning.facts import Facts
from gossamer.planning.plan import Plan, make_plan

from .test_plan import SGD, facts, model

ALL_REDUCE = Candidate(method=PLAIN, fidelity="exact")


def steps_of(found: Facts, made: nn.Module) -> float:
    """Seconds of a step of plain all-reduce on these links."""
    return Prices(found, made, SGD)(ALL_REDUCE)[0]


def plan(found: Facts, made: nn.Module) -> Plan:
    optimizer = SGD(made.parameters())
    return make_plan(found, candidates("loose", [optimizer], found.nodes), "loose", made, [optimizer])


@pytest.mark.parametrize("mbit", [100, 400])
@pytest.mark.parametrize("wrong", [0.8, 1.25])
def test_steps_of_plain_all_reduce_correct_the_links(mbit: float, wrong: float) -> None:
    made, right = model(), facts(mbit)
    measured = replace(right, links=right.links.scaled(wrong))
    found = corrected(measured, made, SGD, ALL_REDUCE, steps_of(right, made))
    for pattern in ("pair", "ring", "all"):
        assert getattr(found.links, pattern).goodput == pytest.approx(mbit * 1e6, rel=0.02)
    assert found.corrected == pytest.approx(1 / wrong, rel=0.02)
    assert plan(found, made).method == plan(right, made).method


@pytest.mark.parametrize("wrong", [0.5, 0.8, 1.25])
def test_steps_that_hide_the_network_need_no_relaxation(wrong: float) -> None:
    """However slow the links seemed: the steps were taken."""
    made, right = model(), facts(30_000)
    seconds = steps_of(right, made)
    assert seconds <= 1.03 * right.compute.seconds
    measured = replace(right, links=right.links.scaled(wrong / 100))
    assert plan(measured, made).method != PLAIN
    found = plan(corrected(measured, made, SGD, ALL_REDUCE, seconds), made)
    assert found.method == PLAIN
    assert found.row.step_seconds == seconds
    assert "plain all-reduce is right" in found.why
