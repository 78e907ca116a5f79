"""Cluster: the benchmark under torchrun."""

import json
import os
import subprocess
import sys

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from gossamer.bench import cluster, link
from gossamer.bench.cases import Case
from gossamer.bench.catalogue import digest
from gossamer.bench.cluster import absent_here, agree, cases_here, joined
from gossamer.cli import app
from gossamer.errors import ConfigurationError
from gossamer.lab.launcher import reserve_port


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def launch(tmp_path, *words, workload="Convnet(0.02)"):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "gossamer.bench"]
    command += [workload, "--rounds", "2", "--steps", "1", "--warmup", "1", "--save-to", str(tmp_path)]
    wide = os.environ | {"COLUMNS": "200"}
    return subprocess.run([*command, *words], env=wide, capture_output=True, text=True, timeout=200)


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_measures_on_the_network_that_is_there(tmp_path):
    done = launch(tmp_path, "--method", "AllReduce()")
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["ddp", "compute", "AllReduce()"]
    assert {(row["network"], row["hosts"]) for row in rows} == {("as is, 2 workers per host", 1)}
    assert rows[0]["tcp_bits_per_second"] > 1e8
    assert rows[2]["bound_seconds"] >= 0.02
    assert done.stdout.count("results.jsonl hold 3 rows") == 1, "one rank shows the table"
    assert "AllReduce()" in done.stdout


OF_A_USER = """
import torch

def build_model():
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))

def random_batch(generator):
    return torch.randn(32, 8, generator=generator), torch.randint(4, (32,), generator=generator)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_torchrun_measures_the_model_of_a_file_with_two_functions(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text(OF_A_USER)
    done = launch(tmp_path / "out", "--method", "Gossip()", workload=str(mine))
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "results.jsonl").read_text().splitlines()]
    assert [row["method"] for row in rows] == ["ddp", "compute", "Gossip()"]
    assert {row["digest"] for row in rows} == {digest(str(mine))}
    parameters = 8 * 16 + 16 + 16 * 4 + 4
    assert rows[2]["payload_bytes"] >= 2 * parameters, "a message of the weights in 16 bits per step"
    assert all(row["step_seconds"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("backend", "network"), [("gloo", "as is, 2 workers per host"), ("nccl", "as is over nccl, 2 workers per host")]
)
def test_rows_tell_what_moves_the_messages(monkeypatch, backend, network):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(cluster.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(cluster.dist, "get_backend", lambda: backend)
    assert cases_here(["Convnet(1)"]) == [Case("Convnet(1)", network, 4)]


@pytest.mark.parametrize(("backend", "network"), [("gloo", "as is on ib0"), ("nccl", "as is over nccl on eth1")])
def test_rows_tell_the_interface_that_was_chosen(monkeypatch, backend, network):
    for name, value in {"LOCAL_WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_SOCKET_IFNAME": "eth1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cluster.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(cluster.dist, "get_backend", lambda: backend)
    assert cases_here(["Convnet(1)"]) == [Case("Convnet(1)", network, 8)]


@pytest.mark.processes
def test_ranks_with_another_copy_of_the_file_are_an_error_on_all_and_wait_for_nobody(tmp_path):
    held = reserve_port("127.0.0.1")
    port = str(held.getsockname()[1])
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    command, running = [sys.executable, "-m", "gossamer.bench", "mine.py", "--save-to", str(tmp_path / "out")], []
    for rank in range(2):
        script = tmp_path / str(rank) / "mine.py"
        script.parent.mkdir()
        script.write_text(
            f"width = {rank + 2}\nimport torch\ndef build_model(): return torch.nn.Linear(width, 2)\n"
            "def random_batch(generator): return torch.rand(1, width), torch.rand(1, 2)\n"
        )
        environment = os.environ | ranks | {"RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
        running.append(subprocess.Popen(command, env=environment, cwd=script.parent, stderr=subprocess.PIPE, text=True))
    with held:
        told = [process.communicate(timeout=100)[1] for process in running]
    assert [process.returncode for process in running] == [2, 2]
    assert all("versions of their files: rank 1 has" in each for each in told)


def test_the_rank_that_was_told_otherwise_is_named(monkeypatch):
    monkeypatch.setattr(cluster, "of_all", lambda own: [own, own, own | {"options": 4}])
    agree({"workloads": ["a"]})
    with pytest.raises(ConfigurationError, match=r"^options: rank 2 has 4, rank 0 has 3$"):
        agree({"workloads": ["a"], "options": 3})


@pytest.mark.processes
def test_a_method_that_fails_under_torchrun_is_named_and_the_others_are_shown(tmp_path):
    done = launch(
        tmp_path, "--per-run", "1", "--method", "AllReduce()", "--method", "with_optimizer(Gossip(), GossipAdamW(speed=1))"
    )
    assert done.returncode != 0
    assert "GossipAdamW: " in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert ["failed" in row for row in rows] == [False, False, False, True]
    assert {(row["network"], row["hosts"]) for row in rows} == {("as is, 2 workers per host", 1)}
    assert rows[0]["tcp_bits_per_second"] > 1e8
    assert rows[2]["bound_seconds"] >= 0.02
    assert done.stdout.count("results.jsonl hold 4 rows") == 1, "one rank shows the table"
    assert "AllReduce()" in done.stdout
    assert "failed: " in done.stdout
    assert "`AllReduce()`" in (tmp_path / "results.md").read_text()


def test_what_cannot_run_here_is_known_before_anything_is_timed(alone):
    (row,) = absent_here(Case("Convnet(1)", "as is", 1), ["bluefog", "ddp"])
    assert row["method"] == "bluefog"
    assert "does not build" in row["missing"]


def test_messages_that_need_not_go_over_tcp_have_no_bound_of_it(monkeypatch):
    monkeypatch.delenv("GOSSAMER_LAB", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(link.dist, "get_world_size", lambda: 8)
    monkeypatch.setattr(link.dist, "get_backend", lambda: "nccl")
    assert link.plain_tcp() == []


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
