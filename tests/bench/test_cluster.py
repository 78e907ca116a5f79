"""Cluster: the benchmark under torchrun."""

import json
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from gossamer.bench import cluster, line
from gossamer.bench.cluster import cases_here, joined
from gossamer.bench.matrix import Case
from gossamer.cli import app


def test_torchrun_measures_on_the_network_that_is_there(tmp_path):
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gossamer.bench"]
    words = ["Convnet(0.02)", "--side", "AllReduce()", "--rounds", "2", "--steps", "1", "--warmup", "1", "--no-memory"]
    command = [sys.executable, *launch, *words, "--save-to", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["side"] for row in rows] == ["ddp", "compute", "AllReduce()"]
    assert {(row["network"], row["hosts"]) for row in rows} == {("as is, 2 workers per host", 1)}
    assert rows[0]["tcp_bits_per_second"] > 1e8
    assert rows[2]["bound_seconds"] >= 0.02
    assert done.stdout.count("results.jsonl hold 3 rows") == 1, "one rank shows the table"
    assert "AllReduce()" in done.stdout


@pytest.mark.parametrize(
    ("backend", "network"), [("gloo", "as is, 2 workers per host"), ("nccl", "as is over nccl, 2 workers per host")]
)
def test_rows_tell_what_moves_the_messages(monkeypatch, backend, network):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(cluster.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(cluster.dist, "get_backend", lambda: backend)
    assert cases_here(["Convnet(1)"]) == [Case("Convnet(1)", network, 4)]


def test_messages_that_need_not_go_over_tcp_have_no_bound_of_it(monkeypatch):
    monkeypatch.delenv("GOSSAMER_LAB", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(line.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(line.dist, "get_backend", lambda: "nccl")
    assert line.plain_tcp() == []


def test_a_model_that_is_left_on_the_processor_beside_a_gpu_is_told_of(monkeypatch, capsys):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    made = []
    monkeypatch.setattr(cluster.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cluster.dist, "init_process_group", made.append)
    monkeypatch.setattr(cluster.dist, "barrier", lambda: None)
    monkeypatch.setattr(cluster.dist, "destroy_process_group", lambda: None)
    with joined(["Convnet(1)"]):
        assert made == ["gloo"]
    assert "build_model() leaves the model on the processor" in capsys.readouterr().err


def test_a_cluster_has_the_network_it_has(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    result = CliRunner().invoke(app, ["bench", "Convnet(1)", "--network", "1gbit", "--save-to", str(tmp_path)])
    assert result.exit_code == 2
    assert "leave --network and --hosts out" in result.output
