"""For how long a rank took part in no exchange, and what shows that the others have gone on since."""

import time

import pytest

from gossamer.comm.torch.absence import Absence


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now


def test_an_absence_is_forgotten_once_a_flow_shows_that_others_have_gone_on(clock: list[float]) -> None:
    absence = Absence(lambda: 0.0)
    absence.active(0)
    clock[0] += 20
    absence.active(1)
    assert absence.seconds == 20
    absence.active(2)
    absence.ended(1)  # what others sent before they gave up
    absence.ended(2)  # the same: it was begun before the end of the first one
    assert absence.seconds == 20
    absence.active(3)
    absence.ended(3)
    assert absence.seconds == 0


def test_what_was_under_way_before_an_absence_shows_nothing(clock: list[float]) -> None:
    absence = Absence(lambda: 0.0)
    absence.active(5)
    clock[0] += 20
    absence.active()
    for _ in range(3):
        absence.ended(5)
    assert absence.seconds == 20


def test_questions_to_the_store_are_no_absence(clock: list[float]) -> None:
    asked = [0.0]
    absence = Absence(lambda: asked[0])
    absence.active()
    clock[0] += 20
    asked[0] += 15
    absence.active()
    assert absence.seconds == 5
