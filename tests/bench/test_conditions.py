"""What a row tells of the machine that it comes from."""

import os

import pytest
import torch

import gossamer
from gossamer.bench import conditions
from gossamer.bench.peers import PEERS


def test_a_row_tells_versions_machine_and_load(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.7, 0.0, 0.0))
    told = conditions.conditions(["ddp", "Gossip()"], 0.2, {"model": 0})
    assert (told["load_before"], told["load_after"]) == (0.2, 0.7)
    assert (told["gossamer"], told["torch"]) == (gossamer.__version__, torch.__version__)
    assert told["python"].count(".") == 2
    assert told["processor"]
    assert 1 <= told["cores"] <= os.cpu_count()
    assert told["packages"] == {}, "these two need nothing beside PyTorch"


def test_a_row_tells_the_gpu_that_was_used(monkeypatch):
    assert conditions.accelerator() == {}
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(conditions.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(conditions.nccl, "version", lambda: (2, 30, 1))
    assert conditions.accelerator() == {"accelerator": "a GPU", "cuda": str(torch.version.cuda), "nccl": "2.30.1"}


def test_peers_are_told_with_the_versions_of_their_distributions(monkeypatch):
    monkeypatch.setattr(conditions, "packages_distributions", lambda: {"torchft": ["torchft-nightly"], "other": ["other"]})
    monkeypatch.setattr(conditions, "version", {"torchft-nightly": "2026.9"}.get)
    assert PEERS["torchft-ddp"].module == "torchft"
    assert conditions.packages(["torchft-ddp", "torchft-diloco", "ddp", "horovod"]) == {"torchft-nightly": "2026.9"}


def test_a_cluster_tells_its_hosts_and_which_of_them_is_busy(monkeypatch):
    monkeypatch.delenv("GOSSAMER_LAB", raising=False)
    monkeypatch.setattr(conditions, "of_all", lambda own: [("b", own[1]), ("a", "another"), ("b", own[1])])
    monkeypatch.setattr(conditions, "processor", lambda: "one")
    assert conditions.of_hosts() == {"host_names": ["a", "b"], "processor": "another / one"}
    monkeypatch.setattr(conditions, "of_all", lambda own: [("a", []), ("b", ["busy"]), ("b", ["busy"])])
    assert conditions.busy_hosts() == ["b: busy"]
    monkeypatch.setenv("GOSSAMER_LAB", "1")
    assert conditions.of_hosts() == {}, "emulated hosts are one machine"


@pytest.mark.parametrize(("load", "warnings"), [(50.0, 1), (0.1, 0)])
def test_a_busy_machine_is_told_before_anything_is_measured(monkeypatch, load, warnings):
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))
    told = conditions.busy_machine()
    assert len(told) == warnings
    assert all(f"load {load}" in line for line in told)
