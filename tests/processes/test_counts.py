"""Ranks that count differently, in real processes: brought together at the end, or told by name what happened."""

import pytest
import torch

from processes.harness import Process, launch_side_by_side, require

MODULE = "scenarios_counts"
UNEVEN = ["a_step_fewer_with_gossip", "a_step_fewer_with_local_sgd"]
ALONE = {
    "consensus_alone": "consensus()",
    "state_dict_alone": "state_dict()",
    "distance_alone": "consensus_distance()",
    "load_state_dict_alone": "load_state_dict()",
    "close_alone": "close(average=True)",
    "join_alone": "join()",
    "state_dict_in_join_alone": "state_dict()",
}
OTHERS = ["a_step_fewer_where_gradients_travel", "forward_pass_alone", "closed_a_step_behind"]


@pytest.fixture(scope="module")
def ended() -> list[Process]:
    return launch_side_by_side(MODULE, [UNEVEN, list(ALONE), OTHERS], 2, timeout=250)


@pytest.mark.parametrize("scenario", UNEVEN)
def test_replicas_of_which_one_took_a_step_fewer_end_equal(ended: list[Process], scenario: str) -> None:
    (first, one), (second, other) = require(ended, scenario)
    assert not first["error"]
    assert not second["error"]
    assert torch.equal(one, other)
    said = first["logged"] + second["logged"]
    assert all(text in said for text in ("rank 0", "10", "rank 1", "9")), said


def test_where_gradients_travel_it_is_said_who_made_a_pass_fewer(ended: list[Process]) -> None:
    """Rank 0 waits in its tenth backward pass for rank 1, which has made nine and closes."""
    (first, _), _ = require(ended, "a_step_fewer_where_gradients_travel")
    assert "rank 1" in first["error"]
    assert "join()" in first["error"]


@pytest.mark.parametrize("scenario", list(ALONE))
def test_a_collective_call_on_one_rank_alone_is_named(ended: list[Process], scenario: str) -> None:
    for report in require(ended, scenario):
        assert ALONE[scenario] in report["error"]
        assert "rank 0" in report["error"]


@pytest.mark.parametrize("scenario", ["forward_pass_alone", "closed_a_step_behind"])
def test_what_one_rank_may_do_alone_leaves_nobody_waiting(ended: list[Process], scenario: str) -> None:
    """A forward pass in training mode; a plain ``close()``, a step behind."""
    for report in require(ended, scenario):
        assert not report["error"]
