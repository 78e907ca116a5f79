"""Cluster: the benchmark under torchrun."""

import json
import subprocess
import sys

from typer.testing import CliRunner

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


def test_a_cluster_has_the_network_it_has(monkeypatch, tmp_path):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "0")
    result = CliRunner().invoke(app, ["bench", "Convnet(1)", "--network", "1gbit", "--save-to", str(tmp_path)])
    assert result.exit_code == 2
    assert "leave --network and --hosts out" in result.output
