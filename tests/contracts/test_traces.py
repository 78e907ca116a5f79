"""What every algorithm and combination sends in each step is what it was: operations, bytes and messages. A wrapper that passes
everything through sends the same, and trains to the same bits."""

from functools import cache

import pytest
from torch import Tensor

from .cases import PassThrough, same_bits
from .traces import WORLDS, Steps, load, subjects, trace

SUBJECTS, RECORDED = subjects(), load()


@cache
def traced(name: str, world: int) -> tuple[list[Steps], list[Tensor]]:
    return trace(SUBJECTS[name], world)


@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("world", [pytest.param(w, marks=[pytest.mark.slow] if w > 4 else []) for w in WORLDS])
def test_a_step_sends_what_it_did(name: str, world: int) -> None:
    """If that is meant to change: ``python -m contracts.traces`` in ``tests``, and a commit that says why."""
    assert traced(name, world)[0] == RECORDED[name][str(world)]


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_wrapper_sends_what_is_inside_sends_and_trains_to_the_same_bits(name: str) -> None:
    inside = SUBJECTS[name]
    around = PassThrough(inner=inside)
    assert around.subject == inside.subject
    sent, trained = trace(around, 4)
    assert sent == RECORDED[name]["4"]
    assert all(map(same_bits, trained, traced(name, 4)[1]))


def test_every_algorithm_is_recorded_and_nothing_else() -> None:
    assert list(RECORDED) == list(SUBJECTS)
