"""Turns: which backward passes steps were taken for."""

from types import SimpleNamespace
from typing import Any

import torch

from gossamer.comm.runner import solo_runner
from gossamer.sync.scaling import LossScale
from gossamer.sync.turns import Turns


def test_a_pass_that_was_thrown_away_is_noticed_whatever_was_accumulated_before() -> None:
    """Also where weights travel, and passes inside no_sync() count as ones to take a step for."""
    backward: Any = SimpleNamespace(passes=0, synchronised_passes=0)
    turns = Turns(solo_runner(), backward, 1, torch.zeros(1), LossScale(None))

    def synchronised() -> bool:
        again = turns.begin_backward()
        backward.passes += 1
        backward.synchronised_passes += 1
        return again

    backward.passes += 1  # inside no_sync()
    assert not synchronised(), "what was accumulated is used"
    turns.note_step(0)
    assert not synchronised()
    assert synchronised(), "no step was taken for the one before"
    turns.note_step(0)
    assert not synchronised()
