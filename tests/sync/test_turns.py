"""Turns: which backward passes steps were taken for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gossamer.comm.runner import solo_runner
from gossamer.errors import UsageError
from gossamer.sync.scaling import LossScale
from gossamer.sync.turns import Turns


def test_a_pass_that_was_thrown_away_is_noticed_whatever_was_accumulated_before() -> None:
    """Also where weights travel, and passes inside no_sync() count as ones to take a step for."""
    backward: Any = SimpleNamespace(passes=0, synchronised_passes=0)
    turns = Turns(solo_runner(), backward, 1, torch.zeros(1), LossScale(None))

    def synchronised() -> list[int]:
        again = turns.waiting
        turns.begin_backward()
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


def test_with_a_scaler_and_weights_that_travel_the_last_pass_of_a_step_is_a_synchronised_one() -> None:
    backward: Any = SimpleNamespace(passes=0, synchronised_passes=0)
    two_ranks: Any = SimpleNamespace(rank=1, world=2)
    turns = Turns(two_ranks, backward, 1, torch.zeros(1), LossScale(torch.amp.GradScaler("cpu")))

    def synchronised() -> None:
        turns.begin_backward()
        backward.passes += 1
        backward.synchronised_passes += 1

    for _ in range(2):
        backward.passes += 1  # inside no_sync()
        with pytest.raises(UsageError, match=r"no backward pass outside of no_sync\(\) has reached"):
            turns.require_backward(0, 0)
        synchronised()
        turns.require_backward(0, 0)
        backward.passes += 1
        with pytest.raises(UsageError, match=r"rank 1: optimizer\.step\(\) at step 0, but .* inside no_sync\(\) came after"):
            turns.require_backward(0, 0)
        synchronised()
        turns.require_backward(0, 0)
        turns.note_step(0)
