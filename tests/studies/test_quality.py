"""Time to quality: the crossing, the targets, the table; and a whole study on tiny data."""

import contextlib
import json

import pytest
import torch
import torch.distributed as dist

from benchmarks.studies import quality as time_to_quality
from benchmarks.studies import quality_run
from benchmarks.studies.crossing import crossing, smoothed
from benchmarks.studies.quality import Runs, main
from benchmarks.studies.quality_table import lines_of as table
from benchmarks.studies.quality_table import seconds_to, target_after
from gossamer.bench.catalogue import digest
from gossamer.bench.plots import require_matplotlib
from gossamer.errors import GossamerError

RISING = [(float(second), quality) for second, quality in enumerate([0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8])]


def a_run(method, seed, factor, measure="accuracy"):
    evaluations = [(10 * index, factor * second, quality) for index, (second, quality) in enumerate(RISING)]
    return {"method": method, "seed": seed, "measure": measure, "evaluations": evaluations}


def test_one_good_evaluation_is_no_crossing():
    assert [quality for _, quality in smoothed(RISING)] == [0.3, 0.4, 0.5, 0.5, 0.6]
    assert crossing(RISING, 0.45, "accuracy") == pytest.approx(3.5)
    assert crossing(RISING, 0.3, "accuracy") == 2.0
    assert crossing(RISING, 0.95, "accuracy") is None
    assert crossing(RISING[:4], 0.1, "accuracy") is None, "too few evaluations"


def test_a_loss_falls_to_its_target():
    falling = [(second, 1.0 - quality) for second, quality in RISING]
    assert crossing(falling, 0.55, "loss") == pytest.approx(3.5)
    assert crossing(falling, 0.2, "loss") is None


def test_a_mean_of_models_has_the_mean_of_running_statistics_and_goes_whatever_happens(monkeypatch):
    """The other worker's tensors are 3 everywhere."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: tensor.add_(3 / 2))
    model = torch.nn.BatchNorm1d(4)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with contextlib.suppress(RuntimeError), quality_run._mean(model):
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, (before[name] + 3) / 2 if tensor.is_floating_point() else before[name]), name
        raise RuntimeError("on purpose")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_the_target_is_what_a_run_had_reached_by_then():
    run = a_run("ddp", 0, 10.0)
    assert target_after(run, 60.0) == 0.6
    assert target_after(run, 39.0) == 0.4
    assert seconds_to(run, 0.4) == pytest.approx(30.0)


def test_methods_are_compared_seed_by_seed():
    rows = [a_run("ddp", 0, 10.0), a_run("ddp", 1, 20.0), a_run("Gossip()", 0, 2.0), a_run("Gossip()", 1, 5.0)]
    lines = table(rows, {0: 0.45, 1: 0.45})
    assert lines[2].startswith("| `ddp` | 2 of 2 | 1500 | 35 (35 to 35) | 52.5 (35.0 to 70.0) | 1.00 (1.00 to 1.00) |")
    assert "4.50 (4.00 to 5.00)" in lines[3]
    assert "not reached" in table(rows, {0: 0.95, 1: 0.95})[3]


def test_how_much_of_what_is_possible_was_reached_is_told_where_steps_without_communication_were_timed():
    rows = [a_run("ddp", 0, 10.0), a_run("compute", 0, 2.0), a_run("Gossip()", 0, 2.5)]
    lines = table(rows, {0: 0.45})
    assert lines[3] == "| `compute` |  | 200 |  |  | at most 5.00 | 1 |"
    assert lines[4].endswith("| 4.00 | 0.80 |")
    without = table([rows[0], rows[2]], {0: 0.45})
    assert "without communication" not in without[0]
    assert without[3].endswith("| 4.00 |")


def test_a_method_is_measured_by_what_computing_took_beside_it():
    """The machine was twice as fast when the second one ran."""
    rows = [a_run("ddp", 0, 10.0) | {"alone": [0.3, 0.2, 0.2]}, a_run("Gossip()", 0, 2.5) | {"alone": [0.1]}]
    lines = table([*rows, a_run("compute", 0, 4.0)], {0: 0.45})
    assert "ms without communication, beside" in lines[0]
    for line, begin, end in zip(
        lines[2:4],
        ("| `ddp` | 1 of 1 | 1000 | 200 |", "| `Gossip()` | 1 of 1 | 250 | 100 |"),
        ("| 0.20 |", "| 0.40 |"),
        strict=True,
    ):
        assert line.startswith(begin)
        assert line.endswith(end)


def test_a_longer_run_takes_the_place_of_a_shorter_one(tmp_path):
    runs = Runs(tmp_path / "deep" / "quality.jsonl")
    key = {"workload": "w", "network": "n", "hosts": 2, "method": "ddp", "seed": 0, "eval_every": 5}
    runs.add([key | {"evaluations": [[5, 1.0, 0.1]]}])
    runs.add([key | {"evaluations": [[5, 1.0, 0.1], [10, 2.0, 0.2]]}])
    runs.add([key | {"seed": 1, "evaluations": []}])
    again = Runs(tmp_path / "deep" / "quality.jsonl")
    assert [len(row["evaluations"]) for row in again.rows] == [2, 0]
    assert again.of(key)["evaluations"][-1][0] == 10


@pytest.fixture
def workload(tmp_path):
    """A line to be learned; its quality is the distance from it."""
    path = tmp_path / "line.py"
    path.write_text(
        "import torch\n"
        "def build_model(): return torch.nn.Linear(8, 1)\n"
        "def build_optimizer(model): return torch.optim.SGD(model.parameters(), lr=0.02)\n"
        "def random_batch(generator):\n"
        "    x = torch.randn(8, 8, generator=generator)\n"
        "    return x, x.sum(1, keepdim=True)\n"
        "def loss(outputs, targets): return (outputs - targets).square().mean()\n"
        "def training_batches(rank, world, seed):\n"
        "    generator = torch.Generator().manual_seed(seed * world + rank)\n"
        "    while True: yield random_batch(generator)\n"
        "def quality(model): return {'loss': float((model.weight - 1).square().mean())}\n"
    )
    return path


@pytest.mark.slow
@pytest.mark.alone
def test_a_study_is_trained_told_and_not_trained_again(tmp_path, workload, capsys, monkeypatch):
    monkeypatch.setattr(time_to_quality, "COMPUTE_SECONDS", 1.5)
    require_matplotlib()
    words = ["--workload", str(workload), "--network", "unshaped", "--hosts", "2", "--methods", "Gossip()", "compute"]
    words += ["--seeds", "1", "--target", "0.2", "--eval-every", "5", "--seconds", "60", "--save-to", str(tmp_path / "out")]
    assert main(words) == 0
    rows = [json.loads(line) for line in (tmp_path / "out" / "quality.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["Gossip()", "compute"]
    assert rows[1]["evaluations"][-1][1] >= 1.5, "it is timed, whatever quality it has"
    for row in rows[:1]:
        assert seconds_to(row, 0.2) is not None
        assert len(row["alone"]) == len(row["evaluations"]) // time_to_quality.ALONE_EVERY >= 1
        assert all(0 < seconds < 1 for seconds in row["alone"])
        assert row["evaluations"][-1][2] < row["evaluations"][0][2]
    assert (tmp_path / "out" / "line-quality.png").stat().st_size > 5000
    assert "| `Gossip()` | 1 of 1 |" in capsys.readouterr().out
    assert main(words) == 0
    assert (tmp_path / "out" / "quality.jsonl").read_text().splitlines() == [json.dumps(row) for row in rows]


def test_a_study_says_what_is_wrong(tmp_path, workload, capsys):
    words = ["--workload", str(workload), "--target", "1", "--save-to", str(tmp_path), "--methods", "compute", "ddp"]
    assert main(words) == 1
    assert "name another method first" in capsys.readouterr().err
    assert main(["--workload", "nowhere.py", "--target", "1", "--save-to", str(tmp_path)]) == 1
    assert "nowhere.py" in capsys.readouterr().err


def test_a_method_that_fails_is_told_in_the_table_and_by_the_exit_code(tmp_path, workload, capsys, monkeypatch):
    require_matplotlib()

    def train(key, seconds, until, told):
        if key["method"] == "ddp-fp16":
            raise GossamerError("nowhere to be\nfound")
        return key | a_run(key["method"], key["seed"], 1.0)

    monkeypatch.setattr(time_to_quality, "train", train)
    words = ["--workload", str(workload), "--target", "0.4", "--seeds", "1", "--save-to", str(tmp_path / "out")]
    assert main([*words, "--methods", "ddp", "ddp-fp16", "Gossip()"]) == 1
    told = (tmp_path / "out" / "line-quality.md").read_text()
    assert told in capsys.readouterr().out
    assert "`ddp-fp16` was not trained with seed 0: nowhere to be found" in told
    assert "| `Gossip()` | 1 of 1 |" in told, "the others go on"


def test_runs_of_another_version_of_the_workload_are_not_taken(tmp_path, workload):
    runs = Runs(tmp_path / "quality.jsonl")
    key = {"workload": str(workload), "network": "n", "hosts": 2, "method": "ddp", "seed": 0, "eval_every": 5}
    runs.add([key | {"evaluations": [[5, 1.0, 0.1]], "digest": digest(workload)}])
    assert runs.of(key) is not None
    workload.write_text(workload.read_text() + "# other\n")
    assert runs.of(key) is None
