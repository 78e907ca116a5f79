"""What every algorithm and combination sends in each step is what it was: operations, bytes and messages."""

import pytest

from .traces import WORLDS, load, subjects, trace

SUBJECTS, RECORDED = subjects(), load()


@pytest.mark.parametrize("world", [pytest.param(w, marks=[pytest.mark.slow] if w > 4 else []) for w in WORLDS])
@pytest.mark.parametrize("name", SUBJECTS)
def test_a_step_sends_what_it_did(name: str, world: int) -> None:
    """If that is meant to change: ``python -m contracts.traces`` in ``tests``, and a commit that says why."""
    assert trace(SUBJECTS[name], world) == RECORDED[name][str(world)]


def test_every_algorithm_is_recorded_and_nothing_else() -> None:
    assert list(RECORDED) == list(SUBJECTS)
