"""What every algorithm and combination sends in each step is what it was: operations, bytes and messages."""

import pytest

from .traces import WORLDS, load, subjects, trace

SUBJECTS, RECORDED = subjects(), load()


@pytest.mark.parametrize("name", SUBJECTS)
def test_a_step_sends_what_it_did(name: str) -> None:
    """If that is meant to change: ``python -m contracts.traces`` in ``tests``, and a commit that says why."""
    for world in WORLDS:
        assert trace(SUBJECTS[name], world) == RECORDED[name][str(world)], f"among {world} ranks"


def test_every_algorithm_is_recorded_and_nothing_else() -> None:
    assert list(RECORDED) == list(SUBJECTS)
