"""The profile of a step by threads: it finds whose processor time it is, on real processes of the lab."""

import os
import threading
import time

import pytest

from benchmarks.studies import threads
from benchmarks.studies.threads import LANES, LOOP, OTHERS, TRANSPORT, Spent, kind
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


@pytest.mark.slow
@pytest.mark.alone
def test_it_profiles_methods_on_emulated_hosts(tmp_path):
    asked = ["--network", "unshaped", "--hosts", "2", "--steps", "8", "--workloads", "Convnet(0.01)"]
    threads.main([*asked, "--save-to", str(tmp_path), "--methods", "compute", "ddp", "ScatterReduce()"])
    rows = read_rows(tmp_path / "threads.jsonl")
    assert [row["method"] for row in rows] == ["compute", "ddp", "ScatterReduce()"]
    assert all(row["step_seconds"] > 0.01 for row in rows)
    assert rows[0]["spent"][LANES] == 0
    assert (tmp_path / "threads.md").read_text() == threads.STUDY.page(rows)


def test_rows_of_other_workloads_are_kept(tmp_path, monkeypatch):
    spent = dict.fromkeys((LOOP, LANES, TRANSPORT, OTHERS, "kernel", "machine"), 0.1)
    about = {"network": "200mbit", "hosts": 4, "method": "ddp", "spent": spent, "when": 0}
    rows = [
        about | {"workload": workload, "step_seconds": seconds}
        for workload, seconds in (("convnet", 1.0), ("gpt", 2.0), ("convnet", 3.0))
    ]
    for row in rows:
        monkeypatch.setattr(threads, "in_lab", lambda options, store, row=row: [row])
        threads.main(["--save-to", str(tmp_path)])
    assert read_rows(tmp_path / "threads.jsonl") == [rows[2], rows[1]]
    assert (tmp_path / "threads.md").read_text() == threads.STUDY.page([rows[2], rows[1]])


def test_what_cannot_be_emulated_is_one_line(tmp_path):
    with pytest.raises(SystemExit, match="threads: "):
        threads.main(["--network", "nonsense", "--save-to", str(tmp_path)])


def test_a_method_that_does_not_exist_is_told_before_anything_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(threads, "lab_json", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit, match=r"unknown method 'Gosip' .* did you mean Gossip"):
        threads.main(["--methods", "compute", "Gosip()", "--save-to", str(tmp_path)])
