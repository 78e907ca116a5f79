"""Peers: what they say of themselves, what happens where one is missing, and that the installed ones train."""

import ast
import contextlib
import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from benchmarks.studies import memory, quality_run
from gossamer.algorithms import registry
from gossamer.bench import paired, peers, ranks
from gossamer.bench.cases import Case, Turns, absent
from gossamer.bench.catalogue import find_workload
from gossamer.bench.in_lab import lab_json
from gossamer.bench.methods import OPTIMIZERS
from gossamer.bench.peers import PEERS, Joined, Peer, builtin
from gossamer.bench.peers.base import wait_for
from gossamer.bench.ranks import own_address
from gossamer.bench.results import Results
from gossamer.bench.tables import COLUMNS, draw
from gossamer.bench.tables import of_rows as table
from gossamer.cli import app
from gossamer.errors import ConfigurationError, GossamerError

CASE = Case("Convnet(0.05)", "200mbit", 4)
OTHERS = [name for name, peer in PEERS.items() if peer.module != "torch" or peer.gone]


def compute(model, optimizer):
    return Joined(model, optimizer)


@pytest.fixture
def alone():
    """A process group of one."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_every_alternative_is_there():
    assert {"accelerate", "deepspeed", "horovod", "torchft-localsgd", "torchft-diloco", "hivemind", "bagua", "bluefog"} <= {
        *OTHERS
    }


@pytest.mark.parametrize("name", [name for name in OTHERS if not PEERS[name].gone])
def test_a_peer_that_is_not_installed_says_how_to_get_it(name, monkeypatch):
    monkeypatch.setattr("gossamer.bench.peers.base.find_spec", lambda module: None)
    assert f"{PEERS[name].module} is not installed: " in PEERS[name].missing()
    assert "pip install" in PEERS[name].missing()


@pytest.mark.parametrize("name", ["bagua", "bluefog"])
def test_what_is_gone_says_why_and_is_not_tried(name):
    assert "does not build" in PEERS[name].missing()
    with pytest.raises(ConfigurationError, match="does not build"):
        PEERS[name].join(torch.nn.Linear(1, 1), None)


def test_what_cannot_be_imported_is_missing_too(tmp_path, monkeypatch):
    (tmp_path / "built_for_another_torch.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    peer = Peer("one", compute, 1.0, module="built_for_another_torch", get="build it again")
    assert peer.missing() is None
    assert "undefined symbol" in peer.missing(load=True)
    assert "build it again" in peer.missing(load=True)


def test_what_is_set_up_over_gloo_is_not_put_beside_what_goes_over_nccl(alone, monkeypatch):
    peer = Peer("one", compute, 1.0, only_gloo=True)
    assert peer.missing() is None
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    assert "over Gloo only" in peer.missing()
    assert {name for name, peer in PEERS.items() if peer.only_gloo} == {name for name in PEERS if name.startswith("torchft")}


@pytest.mark.parametrize(("backend", "megabytes"), [("gloo", 10_000), ("nccl", None)])
def test_power_sgd_has_one_bucket_only_where_it_must(monkeypatch, backend, megabytes):
    made = []

    class Wrapped(torch.nn.Module):
        def __init__(self, model, bucket_cap_mb):
            super().__init__()
            made.append(bucket_cap_mb)

        def register_comm_hook(self, state, hook):
            pass

    monkeypatch.setattr(builtin, "DistributedDataParallel", Wrapped)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    PEERS["ddp-powersgd"].join(torch.nn.Linear(1, 1), None)
    assert made == [megabytes]


def test_names_and_shares_are_in_order():
    for name, peer in PEERS.items():
        assert "\n" not in peer.what, name
        assert peer.period >= 1, name
        assert peer.payload is None or 0 <= peer.payload <= 1, name


def test_a_rank_finds_its_own_address(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"


def test_a_name_that_means_the_host_itself_is_not_told_to_others(monkeypatch):
    ends = {"127.0.1.1": "127.0.0.1", "203.0.113.1": "192.0.2.7"}
    monkeypatch.setattr(ranks, "_own_end", lambda family, to: ends[to[0]])
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert own_address() == "192.0.2.7"
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert own_address() == "127.0.0.1", "there is one host"


def test_a_host_without_a_way_to_the_world_is_its_loopback(monkeypatch):
    def own_end(family, to):
        if to[0] != "127.0.1.1":
            raise OSError("Network is unreachable")
        return "127.0.0.1"

    monkeypatch.setattr(ranks, "_own_end", own_end)
    monkeypatch.setenv("MASTER_ADDR", "127.0.1.1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert own_address() == "127.0.0.1"


def test_an_end_that_does_not_come_is_named():
    with pytest.raises(GossamerError, match="the end of the server"):
        wait_for("the server", lambda: time.sleep(3), seconds=0.05)
    with pytest.raises(GossamerError, match="the server did not end well: no"):
        wait_for("the server", lambda: (_ for _ in ()).throw(ValueError("no")))
    wait_for("the server", lambda: None)


TURNS = {"rounds": 2, "steps_per_round": 5, "timed_steps": 5, "warmup": 4}


def a_row(method, **more):
    figures = {
        "step_seconds": 0.5,
        "ratio": 0.5,
        "ratio_low": 0.49,
        "ratio_high": 0.51,
        "payload_bytes": 2e6,
        "cpu_seconds": 0.2,
    }
    counted = {"interface_bytes": 3e6, "exposed_seconds": 0.1, "wire_seconds": 0.3, "name": "Convnet"}
    case = {"workload": CASE.workload, "network": CASE.network, "hosts": CASE.hosts, "method": method}
    return case | figures | counted | TURNS | more


def test_a_missing_peer_is_a_row_with_its_reason_until_it_is_measured(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    gone = absent(CASE, ["ddp", "bluefog", "AllReduce()"])
    assert [row["method"] for row in gone] == ["bluefog"]
    results.add([a_row("ddp"), *gone])
    again = Results(tmp_path / "results.jsonl")
    assert again.lacking(CASE, ["ddp", "bluefog"], Turns(2)) == ["bluefog"]
    lines = table(again.rows)
    assert "not run: " in lines[3]
    assert PEERS["bluefog"].gone in lines[3]
    assert {line.count("|") for line in lines} == {len([column.title for column in COLUMNS]) + 1}
    assert draw(gone, tmp_path) == []
    again.add([a_row("bluefog")])
    again.add(gone)
    assert again.lacking(CASE, ["bluefog"], Turns(2)) == [], "what was measured once is not forgotten"


def test_a_method_that_cannot_run_is_left_out_of_a_run(alone, monkeypatch):
    result = paired.run(find_workload("Convnet(0.001)"), ["compute", "bagua"], rounds=1, steps=1, warmup=1)
    assert list(result["methods"]) == list(result["seconds"]) == ["compute"]
    assert result["missing"] == {"bagua": PEERS["bagua"].gone}
    with pytest.raises(ConfigurationError, match="bagua"):
        paired.run(find_workload("Convnet(0.001)"), ["bagua"], rounds=1, steps=1)


def test_what_one_rank_lacks_is_missing_everywhere(monkeypatch):
    everyone = [{"ddp": "not on the first"}, {}, {"compute": "not on the third", "ddp": "nor there"}]
    monkeypatch.setattr(paired, "of_all", lambda own: everyone)
    assert paired.missing(["ddp", "compute"]) == {"ddp": "not on the first", "compute": "not on the third"}


def test_a_peer_works_in_its_turns_only_and_is_closed(alone, monkeypatch):
    events = []

    def join(model, optimizer):
        @contextlib.contextmanager
        def turn():
            events.append("begin")
            yield
            events.append("end")

        def backward(loss):
            events.append("backward")
            loss.backward()

        return Joined(model, optimizer, backward=backward, turn=turn, close=lambda: events.append("close"))

    monkeypatch.setitem(PEERS, "made up", Peer("one", join, 1.0, period=2))
    result = paired.run(find_workload("Convnet(0.001)"), ["compute", "made up"], rounds=1, steps=1, warmup=1)
    assert events == ["begin", *["backward"] * 2, "end", "begin", *["backward"] * 4, "end", "close"]
    assert result["methods"]["made up"]["step_seconds"] > 0


def test_memory_and_quality_are_measured_in_a_peers_turn_too(alone, monkeypatch):
    events = []

    @contextlib.contextmanager
    def turn():
        events.append("begin")
        yield
        events.append("end")

    def join(model, optimizer):
        return Joined(model, optimizer, turn=turn, backward=lambda loss: events.append("backward") or loss.backward())

    monkeypatch.setitem(PEERS, "made up", Peer("one", join, 1.0))
    workload = find_workload("Convnet(0.001)")
    memory._train(workload, "made up", 2)
    assert events == ["begin", "backward", "backward", "end"]
    events.clear()
    batch = workload.random_batch(torch.Generator())
    study = replace(workload, training_batches=lambda *_: iter([batch] * 9), quality=lambda model: {"loss": 1.0})
    quality_run.train(study, "made up", 0, quality_run.Goal(seconds=0.0, until=None, eval_every=1))
    assert events == ["begin", "backward", "end"]


def test_the_list_has_everything_that_can_be_typed():
    result = CliRunner().invoke(app, ["bench", "--list-methods"])
    assert result.exit_code == 0, result.output
    first = {line.split()[0] for line in result.output.splitlines()}
    assert {*PEERS, *(f"{name}()" for name in dict(registry())), *(f"{name}()" for name in OPTIMIZERS)} <= first
    assert all(len(line) <= 128 for line in result.output.splitlines())


def test_peers_are_imported_when_they_are_joined_and_not_before():
    foreign = {peer.module for peer in PEERS.values()} - {"torch"}
    for path in Path(peers.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [each.name for each in getattr(node, "names", ())] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not foreign & {name.split(".")[0] for name in names}, path


@pytest.mark.parametrize("name", [name for name in OTHERS if not PEERS[name].gone])
def test_a_peer_that_is_here_trains(name, namespaces):
    if reason := PEERS[name].missing(load=True):
        pytest.skip(reason)
    command = ["-m", "gossamer.bench.paired", "--workload", "Convnet(0.02)", "--methods", "ddp", name]
    result = lab_json(Case("Convnet(0.02)", "1gbit", 2).spec(), [*command, "--rounds", "1", "--steps", "1", "--warmup", "1"])[
        -1
    ]
    assert result["missing"] == {}, json.dumps(result)
    assert result["methods"][name]["step_seconds"] >= 0.02
    sent, ddp = (result["methods"][method]["interface_bytes"] for method in (name, "ddp"))
    assert sent == pytest.approx(PEERS[name].payload * ddp, rel=0.15), "the payload is the one that is told"
