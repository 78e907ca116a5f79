"""The command ``gossamer simulate``: what it prints, and what it refuses."""

import json
import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from gossamer.cli import app

CLUSTER = """\
name = "two levels"
[machines]
count = 4
devices = 2
device = "V100"
[links.between]
rate = "1gbit"
latency = "1ms"
[links.inside]
rate = "100gbit"
"""


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return str(file)


def simulate(*words: str) -> Result:
    return CliRunner(env={"COLUMNS": "120"}).invoke(app, ["simulate", *words])


def told(*words: str) -> dict:
    result = simulate(*words, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


FILE = """
import torch
def build_model():
    return torch.nn.Sequential(torch.nn.Linear(600, 1000), torch.nn.Linear(1000, 400))
def random_batch(generator):
    return torch.rand(5, 600, generator=generator), torch.randint(0, 400, (5,), generator=generator)
"""


@pytest.fixture
def model(tmp_path: Path) -> str:
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    return str(file)


def test_the_table_names_every_method_and_what_limits_it(cluster: str, model: str) -> None:
    result = simulate(cluster, "--model", model, "--method", "Gossip()", "--compute", "1ms", "--machines", "2,4")
    assert result.exit_code == 0, result.stderr
    assert "mine.py: 1.0 million parameters, 4.0 MB of gradients" in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if "ddp" in line or "Gossip" in line]
    assert [(line[0], line[1], line[-1]) for line in lines] == [
        ("2", "ddp", "wire"), ("2", "Gossip()", "wire"), ("4", "ddp", "wire"), ("4", "Gossip()", "wire"),
    ]  # fmt: skip


def test_what_a_step_is_spent_on_adds_up(cluster: str, model: str) -> None:
    Path(cluster).write_text(CLUSTER + '[processor]\ncopy = "1GB/s"\n[stragglers]\njitter = 0.1\n')
    found = told(cluster, "--model", model, "--method", "ScatterReduce()", "--compute", "0.1s", "--machines", "2..4")
    assert [(row["machines"], row["workers"]) for row in found["rows"]] == [(2, 4), (2, 4), (4, 8), (4, 8)]
    for row in found["rows"]:
        assert sum(row["limits"].values()) == pytest.approx(row["step_seconds"])
        assert row["limits"]["compute"] == pytest.approx(0.1)
        assert min(row["limits"][name] for name in ("rounds", "wire", "codec", "stragglers")) > 0
        assert row["efficiency"] == pytest.approx(0.1 / row["step_seconds"])
    assert [row["to_ddp"] for row in found["rows"] if row["method"] == "ddp"] == [1, 1]


def test_json_holds_all_inputs(cluster: str) -> None:
    command = (cluster, "--model", "googlenet", "--method", "Gossip()", "--compute", "300ms", "--batch", "7")
    found = told(*command)
    assert shlex.split(found["inputs"]["command"])[:3] == ["gossamer", "simulate", cluster]
    assert sum(found["compute_seconds"].values()) == pytest.approx(0.3)
    assert (found["model"]["parameters"], found["model"]["batch_per_device"]) == (6_998_552, 7)
    assert found["cluster"]["between"] | {"transport": None} == {"bandwidth": 1e9, "latency": 1e-3, "transport": None}
    assert found["cluster"]["between"]["transport"]["ceiling"] is None, "infinite"
    assert told(*shlex.split(found["inputs"]["command"])[2:])["rows"] == found["rows"], "the command makes them again"


def test_without_seconds_compute_is_estimated_from_the_device(cluster: str) -> None:
    slow, fast = (
        told(cluster, "--model", "googlenet", "--method", "Gossip()", "--precision", each) for each in ("fp32", "fp16")
    )
    passes = [found["compute_seconds"]["forward"] + found["compute_seconds"]["backward"] for found in (slow, fast)]
    assert passes[0] / passes[1] == pytest.approx(125 / 15.7)
    assert passes[0] == pytest.approx(slow["model"]["operations_per_step"] / (0.4 * 15.7e12))


def test_a_file_with_a_model_and_a_batch_is_enough(cluster: str, model: str) -> None:
    found = told(cluster, "--model", model, "--method", "Gossip()", "--compute", "0.1s")
    assert (found["model"]["parameters"], found["model"]["batch_per_device"]) == (1_001_400, 5)
    assert found["model"]["operations_per_step"] == 2 * 5 * 1000 * (2 * 600 + 3 * 400), "the input needs no gradient"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--model", "resnet51"], "unknown model 'resnet51'"),
        (["--method", "Gosip()"], "did you mean Gossip"),
        (["--method", "ddp-fp16"], "ddp-fp16 is not predicted: gossamer's own methods and ddp are"),
        (["--machines", "8..2..1"], "--machines 8..2..1: write a number"),
        (["--machines", "0"], "--machines 0: write a number"),
        (["--compute", "0.3"], "'0.3' has no unit"),
        (["--compute", "0s"], "--compute must be above 0"),
        (["--dtype", "fp8"], "--dtype fp8: parameters may be fp32"),
        (["--precision", "bf16"], "V100 multiplies no matrices in 'bf16'; it does in fp32, fp16"),
        (["--utilisation", "1.5"], "--utilisation 1.5: a share of the peak"),
        (["--model", "decoder-7b"], r"decoder-7b with 1 sequences per device takes .* GiB .* a V100 has 32: take a smaller"),
        (["--model", "nothing.py"], "there is no file nothing.py"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(cluster: str, words: list[str], complaint: str) -> None:
    result = simulate(cluster, *words)
    assert result.exit_code == 2
    assert (message := result.stderr.strip()).startswith("gossamer simulate: ")
    assert re.search(complaint, message), message


def test_a_cluster_without_a_device_needs_the_seconds_of_a_step(cluster: str, model: str) -> None:
    Path(cluster).write_text(CLUSTER.replace('device = "V100"\n', ""))
    result = simulate(cluster)
    assert (result.exit_code, "say how long a step computes" in result.stderr) == (2, True)
    assert simulate(cluster, "--model", model, "--method", "Gossip()", "--compute", "0.1s").exit_code == 0


def test_pictures_and_results_are_saved(cluster: str, model: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    words = ("--model", model, "--method", "Gossip()", "--compute", "0.1s", "--machines", "2,4", "--save-to", str(folder))
    assert simulate(cluster, *words).exit_code == 0
    assert {path.name for path in folder.glob("*.png")} == {"speedup.png", "bandwidth.png"}
    assert len(json.loads((folder / "results.json").read_text())["rows"]) == 4


def events(path: Path) -> tuple[dict[int, str], list[dict]]:
    """The names of the rows of a trace by number, and what happens in them."""
    trace = json.loads(path.read_text())["traceEvents"]
    rows = {each["tid"]: each["args"]["name"] for each in trace if each["name"] == "thread_name"}
    return rows, [each for each in trace if each["ph"] == "X"]


def test_a_trace_shows_one_step(cluster: str, model: str, tmp_path: Path) -> None:
    Path(cluster).write_text(CLUSTER + '[processor]\ncopy = "10GB/s"\ncomputes = false\n')
    words = (cluster, "--model", model, "--method", "ScatterReduce()", "--compute", "10ms")
    found = told(*words, "--save-to", str(tmp_path))
    for row in found["rows"]:
        rows, happened = events(tmp_path / f"trace-{row['method'].strip('()')}.json")
        assert {"compute", "waiting", "codecs and copies", "link between machines"} <= set(rows.values())
        spent = {name: sum(each["dur"] for each in happened if rows[each["tid"]] == name) for name in rows.values()}
        assert spent["compute"] == pytest.approx(1e4)
        assert 0.95 < (spent["compute"] + spent["waiting"]) / (1e6 * row["step_seconds"]) <= 1, "but for packing"
        for number in rows:
            line = sorted((each["ts"], each["ts"] + each["dur"]) for each in happened if each["tid"] == number)
            assert all(end <= begin + 1e-3 for (_, end), (begin, _) in pairwise(line)), "nothing overlaps in a row"


DATA = """
def training_batches(rank, world, seed):
    generator = torch.Generator().manual_seed(world * seed + rank)
    while True:
        inputs = torch.rand(5, 600, generator=generator)
        yield inputs, inputs[:, :400].argmax(1)
def quality(net):
    return {"loss": float(sum(p.square().sum() for p in net.parameters()))}
"""


def test_training_gives_losses_over_the_time_of_the_cluster(cluster: str, model: str) -> None:
    Path(model).write_text(FILE + DATA)
    words = (cluster, "--model", model, "--method", "Gossip()", "--compute", "10ms", "--machines", "2")
    exact, gossip = curves = told(*words, "--train", "6")
    steps = {row["method"]: row["step_seconds"] for row in told(*words)["rows"]}
    assert {curve["method"]: curve["step_seconds"] for curve in curves} == steps
    assert [len(curve["losses"]) for curve in curves] == [6, 6]
    assert exact["losses"][0] == gossip["losses"][0], "all begin with the same weights and batches"
    assert exact["losses"] != gossip["losses"]
    assert exact["quality"]["loss"] > 0
    table = simulate(*words, "--train", "6").stdout
    assert f"{6 * steps['ddp']:.1f}" in table


@pytest.mark.parametrize(
    ("method", "data", "complaint"),
    [("Gossip(lag=2)", DATA, "cannot be trained in virtual time"), ("Gossip()", "", "defines no training_batches")],
)
def test_training_that_virtual_time_does_not_tell_is_refused(
    cluster: str, model: str, method: str, data: str, complaint: str
) -> None:
    Path(model).write_text(FILE + data)
    result = simulate(cluster, "--model", model, "--method", method, "--compute", "10ms", "--machines", "1", "--train", "2")
    assert (result.exit_code, complaint in result.stderr) == (2, True), result.stderr


@pytest.mark.parametrize(
    ("kind", "states"), [("AdamW(p, fused=True)", 2), ("RMSprop(p, momentum=0.9)", 2), ("SGD(p, lr=1)", 0)]
)
def test_a_file_may_have_any_optimizer_of_torch(cluster: str, model: str, kind: str, states: int) -> None:
    made = f"def build_optimizer(model):\n    p = list(model.parameters())\n    return torch.optim.{kind}\n"
    Path(model).write_text(f"{FILE}\n{made}")
    found = told(cluster, "--model", model, "--method", "Gossip()", "--compute", "10ms", "--machines", "1")["model"]
    assert found["memory_bytes"]["optimizer"] == pytest.approx(states * 4 * found["parameters"], rel=1e-3)


@pytest.mark.parametrize(
    "wrong",
    [
        "def build_optimizer(net): return [torch.optim.SGD(net.parameters(), lr=0.1)]",
        "def loss(outputs, targets): return outputs['loss']",
    ],
)
def test_a_file_whose_step_fails_is_told_in_one_line(cluster: str, model: str, wrong: str) -> None:
    path = Path(model)
    path.write_text(f"{path.read_text()}\n{wrong}\n")
    result = simulate(cluster, "--model", model, "--compute", "10ms")
    assert result.exit_code == 2
    assert f"{path}: a step of its model, on tensors without values, raises" in result.output
