"""Memory: what is measured of it, and what becomes of that."""

from functools import partial

import pytest

from benchmarks.studies import memory
from benchmarks.studies.memory import Peak, beyond, in_turn
from gossamer.bench.in_lab import lab_json
from gossamer.bench.results import Results
from gossamer.bench.suites import Run
from gossamer.bench.tables import of_rows as table
from gossamer.errors import GossamerError
from gossamer.lab import LabSpec

from .rows import a_row


def test_the_rank_that_needs_most_counts_in_units_of_the_gradients():
    one = {"compute": [Peak(300, 100), Peak(310, 100)], "ddp": [Peak(400, 100), Peak(410, 100)]}
    two = {"compute": [Peak(300, 100), Peak(300, 100)], "ddp": [Peak(430, 100), Peak(430, 100)]}
    found = beyond([one, two])
    assert found["ddp"] == {"memory": pytest.approx(1.3), "memory_noise": pytest.approx(0.1)}
    assert found["compute"]["memory"] == 0
    assert "| 1.30 ± 0.10 |" in table([a_row("ddp", **found["ddp"])])[2]
    assert table([a_row("compute", **found["compute"])])[2].endswith("|  |")
    assert table([a_row("ddp")])[2].endswith("|  |")


def test_a_method_that_failed_on_some_rank_has_no_figures():
    one = {"compute": [Peak(300, 100)], "ddp": [Peak(400, 100)]}
    assert beyond([one, {"compute": [Peak(300, 100)]}]) == {"compute": {"memory": 0, "memory_noise": 0}}
    assert beyond([one, {}]) == {}


@pytest.fixture
def workload(tmp_path):
    """32 MB of gradients and little else."""
    path = tmp_path / "wide.py"
    path.write_text(
        "import torch\n"
        "def build_model(): return torch.nn.Linear(4096, 2048, bias=False)\n"
        "def build_optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "def random_batch(generator): return torch.rand(1, 4096, generator=generator), torch.zeros(1, 2048)\n"
        "def loss(outputs, targets): return (outputs - targets).square().mean()\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.alone
def test_every_rank_tells_the_peak_of_a_training(workload):
    found = in_turn([], partial(lab_json, LabSpec(hosts=2, shaping="none")), str(workload), repeats=1)
    assert [each.keys() for each in found] == [{"compute"}] * 2
    assert all(each["compute"][0].gradients == 4 * 2048 * 4096 < each["compute"][0].nbytes for each in found)


@pytest.mark.alone
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_buckets_of_ddp_are_seen_and_its_absence_too(workload):
    here = partial(lab_json, LabSpec(hosts=2, shaping="none"))
    found = in_turn(["ddp", "Gossip()"], here, str(workload), repeats=1)
    assert len(found) == 2
    assert found[0]["ddp"][0].gradients == 4 * 2048 * 4096
    assert found[0].keys() == {"compute", "ddp", "Gossip()"}
    figures = beyond(found)
    assert figures["compute"] == {"memory": 0, "memory_noise": 0}
    assert 0.8 < figures["ddp"]["memory"] < 2.0  # its buckets, and what the gradient is before it is in one
    assert 0.8 < figures["Gossip()"]["memory"] < 1.5  # the copy in which the weights travel


def test_a_method_that_fails_once_is_left_out_and_told_of_and_the_others_go_on(capfd):
    calls = []

    def train(command):
        calls.append(command[-1])
        if calls.count("ddp") == 2 and command[-1] == "ddp":
            raise GossamerError("Traceback\nrank 1 fell over")
        return [{"rank": 1, "nbytes": 300, "gradients": 100}, {"rank": 0, "nbytes": 400, "gradients": 100}]

    found = in_turn(["ddp", "Gossip()"], train, "mine.py")
    assert calls == ["compute", "ddp", "Gossip()"] * 2
    assert [each.keys() for each in found] == [{"compute", "Gossip()"}] * 2
    assert "the memory of ddp is not known: rank 1 fell over" in capfd.readouterr().err
    assert found[1]["compute"] == [Peak(300, 100)] * 2
    assert in_turn([], lambda command: [], "mine.py") == []
    assert beyond([]) == {}


def test_rows_get_figures_once_on_a_network_without_limits_whatever_theirs_is(tmp_path, monkeypatch):
    run = Run(("Convnet(0.05)",), ("20mbit+2ms/slow-host=2x",), (3,), rounds=2, steps=1, warmup=1, memory=True)
    about = {"workload": "Convnet(0.05)", "network": run.networks[0], "hosts": 3, "steps_per_round": 1, "warmup": 1}
    results = Results(tmp_path / "results.jsonl")
    results.add([a_row(method, **about) for method in ("compute", "ddp")])
    seen = []

    def lab_json(spec, command):
        seen.append((command[-1], spec))
        return [{"rank": 0, "nbytes": 150 if command[-1] == "ddp" else 100, "gradients": 100}]

    monkeypatch.setattr(memory, "lab_json", lab_json)
    memory.add_to(results, run)
    assert [method for method, _ in seen] == ["compute", "ddp"] * memory.REPEATS
    assert [rate.bps for rate in seen[0][1].rates] == [None] * 3
    assert (seen[0][1].latency_s, seen[0][1].slow) == (0, {})
    found = {row["method"]: row["memory"] for row in Results(tmp_path / "results.jsonl").rows}
    assert found == {"compute": 0.0, "ddp": 0.5}
    memory.add_to(results, run)
    assert len(seen) == 2 * memory.REPEATS, "what has figures is left alone"
