"""The bench beside DDP: what it saves, beside what was measured before."""

import json
from pathlib import Path

import pytest

from benchmarks.studies import speed


def a_row(rate: str, seconds: float, machine: str) -> dict[str, object]:
    figures = {"step_seconds": seconds, "ratio": 1.0, "ratio_low": 0.9, "ratio_high": 1.1}
    told = {"cores": 2, "processor": machine, "torch": "2"}
    return {"workload": "w", "rate": rate, "world": 4, "rounds": 20, "methods": {"ddp": figures}, "conditions": told, "when": 0}


def test_rows_of_other_networks_are_kept_with_the_machine_that_they_were_taken_on(tmp_path: Path) -> None:
    speed.save(tmp_path, [a_row("1gbit", 1.0, "Old"), a_row("200mbit", 2.0, "Old")])
    speed.save(tmp_path, [a_row("200mbit", 3.0, "New")])
    saved = json.loads((tmp_path / "speed.json").read_text())
    assert [(row["rate"], row["methods"]["ddp"]["step_seconds"]) for row in saved["steps"]] == [
        ("1gbit", 1.0),
        ("200mbit", 3.0),
    ]
    assert saved["machine"] == "4 emulated hosts on 2 cores of New, torch 2; 2 cores of Old, torch 2"
    assert (tmp_path / "speed.md").read_text() == speed.page(saved)


def test_a_busy_machine_is_told_of_before_anything_is_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(speed, "busy_machine", lambda: ["The machine was busy."])
    monkeypatch.setattr(speed, "_measure_and_save", lambda options, specs: None)
    monkeypatch.setattr("sys.argv", ["speed", "--workloads", "Convnet(0.01)"])
    speed.main()
    assert "The machine was busy." in capsys.readouterr().err
