"""The profile of a step by threads: it finds whose processor time it is, on real processes of the lab."""

import os
import sys
import threading
import time

import pytest

from benchmarks.studies import threads
from benchmarks.studies.threads import LANES, LOOP, OTHERS, TRANSPORT, Spent, kind, table
from gossamer.bench.rows import read_rows


def test_threads_are_told_apart():
    assert kind(os.getpid(), "MainThread", "python") == LOOP
    assert kind(0, "gossamer-lane-1", "python") == LANES
    assert kind(0, "", "gloo_tcp_loop") == TRANSPORT
    assert kind(0, "", "pt_autograd_0") == OTHERS


def test_processor_time_is_that_of_who_spent_it():
    def spin(end):
        while time.thread_time() < end:
            pass

    before = Spent.read()
    end, stay = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (spin(0.3), end.set(), stay.wait()), name="gossamer-lane-0")
    thread.start()
    end.wait()
    spent = Spent.read().since(before, 1)
    stay.set()
    thread.join()
    assert 0.25 < spent[LANES] < 0.5
    assert spent[LOOP] < 0.2
    assert spent["machine"] > 0.25


def test_it_profiles_methods_on_emulated_hosts(tmp_path, monkeypatch):
    asked = [
        "--network",
        "unshaped",
        "--hosts",
        "2",
        "--steps",
        "8",
        "--workloads",
        "Convnet(0.01)",
        "--save-to",
        str(tmp_path),
    ]
    monkeypatch.setattr(sys, "argv", ["threads", *asked, "--methods", "compute", "ddp", "ScatterReduce()"])
    threads.main()
    (row,) = read_rows(tmp_path / "threads.jsonl")
    assert list(row["threads"]) == ["compute", "ddp", "ScatterReduce()"]
    assert all(method["step_seconds"] > 0.01 for method in row["threads"].values())
    assert row["threads"]["compute"]["spent"][LANES] == 0
    assert (tmp_path / "threads.md").read_text() == "\n".join(table([row])) + "\n"


def test_rows_of_other_workloads_are_kept(tmp_path):
    spent = dict.fromkeys((LOOP, LANES, TRANSPORT, OTHERS, "kernel", "machine"), 0.1)
    rows = [
        {"workload": workload, "network": "200mbit", "world": 4, "threads": {"ddp": {"step_seconds": seconds, "spent": spent}}}
        for workload, seconds in (("convnet", 1.0), ("gpt", 2.0), ("convnet", 3.0))
    ]
    for row in rows:
        threads.save(tmp_path, row)
    assert read_rows(tmp_path / "threads.jsonl") == [rows[2], rows[1]]
    assert (tmp_path / "threads.md").read_text() == "\n".join(table([rows[2], rows[1]])) + "\n"


def test_what_cannot_be_emulated_is_one_line(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["threads", "--network", "nonsense"])
    with pytest.raises(SystemExit, match="threads: "):
        threads.main()


def test_a_method_that_does_not_exist_is_told_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["threads", "--methods", "compute", "Gosip()"])
    monkeypatch.setattr(threads, "lab_result", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit, match=r"unknown method 'Gosip' .* did you mean Gossip"):
        threads.main()
