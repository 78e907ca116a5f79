"""gossamer bench: what is kept when something fails."""

import json

import pytest

from gossamer.bench import command
from gossamer.bench.command import Place, Plan
from gossamer.bench.matrix import Case, Results, Turns
from gossamer.errors import GossamerError

from .test_matrix import a_row

CASE = Case("Convnet(0.05)", "200mbit", 4)
TURNS = Turns(2, 1, 1)


def a_place(fails=(), forgets=(), separate=True):
    def measure(case, sides, turns, on_record):
        if set(fails) & set(sides):
            raise GossamerError("rank 1 fell over")
        return [a_row(side) for side in sides]

    def memory(case, sides):
        if set(forgets) & set(sides):
            raise GossamerError("no memory left")
        return {side: {"memory": 1.0, "memory_noise": 0.0} for side in sides}

    return Place(lambda case, sides: [], measure, memory, separate)


def run(place, tmp_path, sides, memory=False, at_once=1):
    results = Results(tmp_path / "results.jsonl")
    plan = Plan(sides, TURNS, at_once, memory, False)
    command._run(place, [CASE], plan, results, quiet=True)


def kept(tmp_path):
    return {row["side"]: row for row in map(json.loads, (tmp_path / "results.jsonl").read_text().splitlines())}


def test_a_portion_that_fails_leaves_the_next_one_unharmed(tmp_path):
    with pytest.raises(GossamerError, match=r"what was measured is kept(.|\n)*QSGD\(\): rank 1 fell over"):
        run(a_place(fails=["QSGD()"]), tmp_path, ["QSGD()", "Gossip()"])
    assert kept(tmp_path).keys() == {"ddp", "compute", "Gossip()"}


@pytest.mark.parametrize("memory", [False, True])
def test_a_side_that_fails_takes_none_of_its_portion_along(tmp_path, memory):
    sides = ["AllReduce()", "QSGD()", "Gossip()", "ScatterReduce()"]
    with pytest.raises(GossamerError) as caught:
        run(a_place(fails=["QSGD()"]), tmp_path, sides, memory, at_once=3)
    assert str(caught.value).splitlines()[1:] == [f"{CASE}, ddp, compute, QSGD(): rank 1 fell over"]
    assert kept(tmp_path).keys() == {"ddp", "compute", *sides} - {"QSGD()"}


def test_where_all_are_measured_by_the_same_ranks_it_is_the_end(tmp_path):
    with pytest.raises(GossamerError, match=r"^rank 1 fell over$"):
        run(a_place(fails=["QSGD()"], separate=False), tmp_path, ["QSGD()", "Gossip()"])


def test_step_times_are_kept_when_memory_cannot_be_measured(tmp_path):
    with pytest.raises(GossamerError, match="no memory left"):
        run(a_place(forgets=["Gossip()"]), tmp_path, ["Gossip()"], memory=True)
    assert "memory" not in kept(tmp_path)["Gossip()"]
    assert kept(tmp_path)["Gossip()"]["step_seconds"]
