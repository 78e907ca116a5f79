"""The bench of the overhead: every method is timed with and without others, and trains."""

import json
import mmap
import resource
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.studies import overhead
from benchmarks.studies.absent import AbsentRunner


def test_every_method_is_timed_beside_training_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["--device", "cpu", "--sizes", "Convnet", "--rounds", "2", "--steps", "1", "--save-to", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["overhead", *asked])
    overhead.main()
    assert not dist.is_initialized()
    rows = [json.loads(line) for line in (tmp_path / "overhead.jsonl").read_text().splitlines()]
    assert [(row["world"], row["method"]) for row in rows] == [
        (world, method) for world in (1, 8) for method in overhead.METHODS
    ]
    assert all(row["step_seconds"] > 0 and len(row["seconds"]) == 2 for row in rows)
    assert all((row["beyond"] == 0) == (row["method"] == overhead.ALONE) for row in rows)
    page = (tmp_path / "overhead.md").read_text()
    assert page.count("| Convnet | 8 |") == len(overhead.METHODS)
    assert "of fewer than 6 rounds: lowest to highest" in page.splitlines()[0]


def test_what_the_process_used_stands_beside_the_step_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method that computes for 20 ms a step, and one that touches new memory."""

    def compute() -> None:
        end = time.process_time() + 0.02
        while time.process_time() < end:
            sum(range(1000))

    def trained(size: str, method: str, device: torch.device) -> overhead.Step:
        return compute if method == overhead.ALONE else lambda: mmap.mmap(-1, 2**24).write(bytes(2**24))

    monkeypatch.setattr(overhead, "trained", trained)
    monkeypatch.setattr(overhead, "METHODS", dict.fromkeys((overhead.ALONE, "toucher")))
    busy, toucher = rows = overhead.rows_of("Convnet", 1, overhead.measure("Convnet", 1, torch.device("cpu"), 6, 2))
    assert 0.01 < busy["user_seconds"] <= busy["user_seconds"] + busy["kernel_seconds"] < 0.03
    pages = 2**24 / resource.getpagesize()
    assert busy["page_faults"] < pages / 4
    assert pages / 600 < toucher["page_faults"] < 3 * pages, "a huge page may be 512 small ones"
    told = {"processor": "one", "torch": "2"}
    head, _, _, second, *_ = overhead.STUDY.page([busy | told, toucher | told]).splitlines()
    assert head.endswith("| in user mode, ms | in the kernel, ms | page faults |")
    assert second.endswith(f"| {toucher['page_faults']:.0f} |")
    older = {name: value for name, value in busy.items() if name not in overhead.USED} | told
    assert overhead.STUDY.page([older, rows[1] | told]).splitlines()[2].endswith("|  |  |  |  |")


@pytest.mark.parametrize("method", overhead.METHODS)
@pytest.mark.parametrize("world", [1, 8])
def test_every_method_does_what_training_with_others_does(method: str, world: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 3)
    monkeypatch.setattr(overhead, "Emulated", lambda layers, seconds: model)
    with overhead.group_of(world, torch.device("cpu")):
        step = overhead.trained("Convnet", method, torch.device("cpu"))
        for _ in range(4):
            before = model.bias.detach().clone()
            step()
            # Of the sum of all ranks' gradients there is only this one's, a one; DDP is timed without its division.
            share = world if method == overhead.OURS else 1
            torch.testing.assert_close(before - model.bias, torch.full((3,), 1e-3 / share), rtol=1e-3, atol=1e-7)


def test_what_goes_wrong_in_a_lane_is_raised_where_it_is_waited_for() -> None:
    with overhead.group_of(8, torch.device("cpu")):
        runner = AbsentRunner(torch.device("cpu"))

        def broken():
            raise ValueError("on purpose")
            yield

        with pytest.raises(ValueError, match="on purpose"):
            runner.wait(runner.submit(broken, "a flow"))
        runner.close()
