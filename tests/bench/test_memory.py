"""Memory: what is measured of it, and what becomes of that."""

import json
import os
import socket
import subprocess
import sys

import pytest

from gossamer.bench import memory
from gossamer.bench.in_lab import lab_json
from gossamer.bench.memory import Peak, beyond, read
from gossamer.bench.tables import of_rows as table
from gossamer.lab import LabSpec

from .test_cases import a_row


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


def test_buckets_of_ddp_are_seen_and_its_absence_too(workload):
    command = ["-m", "gossamer.bench.memory", "--workload", str(workload), "--repeats", "1"]
    found = read(lab_json(LabSpec(hosts=2, shaping="none"), [*command, "--methods", "ddp", "Gossip()", "Nothing()"]))
    assert len(found) == 2
    assert found[0]["ddp"][0].gradients == 4 * 2048 * 4096
    assert found[0].keys() == {"compute", "ddp", "Gossip()"}, "what cannot run is left out"
    figures = beyond(found)
    assert figures["compute"] == {"memory": 0, "memory_noise": 0}
    assert 0.8 < figures["ddp"]["memory"] < 2.0  # its buckets, and what the gradient is before it is in one
    assert 0.8 < figures["Gossip()"]["memory"] < 1.5  # the copy in which the weights travel


def test_all_methods_meet_at_one_port_whoever_uses_the_next_ones(workload):
    pids = workload.with_suffix(".pids")
    workload.write_text(f"import os\nopen({str(pids)!r}, 'a').write(f'{{os.getpid()}} ')\n" + workload.read_text())
    port, taken = _port_with_busy_neighbours(4)
    ranks = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "gossamer.bench.memory", "--workload", str(workload)]
    command += ["--repeats", "1", "--methods", "ddp"]
    processes = [
        subprocess.Popen(command, env=os.environ | ranks | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    try:
        found = read(json.loads(process.communicate(timeout=100)[0]) for process in processes)
    finally:
        for process in processes:
            process.kill()
        for each in taken:
            each.close()
    assert [peaks.keys() for peaks in found] == [{"compute", "ddp"}] * 2
    loaded = set(map(int, pids.read_text().split()))
    assert len(loaded) == 4
    assert not loaded & {process.pid for process in processes}, "what the file computes may start threads, which forbid a fork"


def test_a_training_that_does_not_end_is_killed_and_told_of(capfd):
    child = subprocess.Popen(["sleep", "60"])
    assert not memory._ended(child.pid, "the training with ddp", 0.1)
    assert "the training with ddp was killed: it had not ended after 0.1 s" in capfd.readouterr().err
    assert memory._ended(subprocess.Popen(["true"]).pid, "x", 20)
    assert not memory._ended(subprocess.Popen(["false"]).pid, "x", 20)
    child.returncode = -9  # Popen has not waited for it


def _port_with_busy_neighbours(count: int) -> tuple[int, list[socket.socket]]:
    """A free port, and listeners at the ``count`` ports after it."""
    while True:
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
            taken: list[socket.socket] = []
            try:
                for next_one in range(port + 1, port + 1 + count):
                    taken.append(socket.create_server(("", next_one)))
            except (OSError, OverflowError):
                for each in taken:
                    each.close()
            else:
                return port, taken
