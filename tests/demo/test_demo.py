"""The demo: what it makes of logs, and the whole of it in a tiny setting."""

import json
import math
from pathlib import Path
from typing import Any

import pytest

import benchmarks.demo.__main__ as demo
from benchmarks.demo import run as demo_run
from benchmarks.demo.picture import Sooner
from benchmarks.demo.report import Report
from benchmarks.demo.run import WARM_UP, DemoError, Run, exposed_seconds


def a_run(title: str, step_seconds: float, steps: int, *, every: int = 10, **counters: float) -> Run:
    """The run of a log in which every step takes the same time, and the validation loss falls by 0.1 per step."""
    run = Run(title, title, (), steps)
    run.add(json.dumps({"algorithm": title, "world": 4, "parameters": 100, "torch": "2.0"}))
    for step in range(1, steps + 1):
        counted = {"step": step, "seconds": step * step_seconds, **{name: step * size for name, size in counters.items()}}
        run.add(json.dumps({"loss": 1.0, "items": 32 * step, **counted}))
        if step % every == 0:
            run.add(json.dumps({"validation_loss": 10 - step / 10, **counted}))
    return run


class TestRun:
    def test_means_over_steps(self) -> None:
        run = a_run("x", 0.25, 40, payload_bytes=7.0, interface_bytes=9.0)
        assert run.step_seconds == pytest.approx(0.25)
        assert run.items_per_second == pytest.approx(32 / 0.25)
        assert run.payload_per_step == pytest.approx(7)
        assert run.per_step("interface_bytes") == pytest.approx(9)
        assert run.per_step("exposed_seconds") is None

    def test_bytes_that_pass_during_an_evaluation_are_not_missed(self) -> None:
        run = a_run("x", 0.25, 40, payload_bytes=7.0)
        for number, step in enumerate(run.steps):
            # Half a message ends its way while the clock and the counters stand still.
            step["interface_bytes"] = 9.0 * step["step"] - 4.5 * (number // 10)
        assert run.per_step("interface_bytes") == pytest.approx(9)

    def test_the_waiting_before_an_evaluation_counts(self) -> None:
        run = a_run("x", 0.25, 40, payload_bytes=7.0)
        run.evaluations[-1]["seconds"] += 3.5
        assert run.step_seconds == pytest.approx(0.25 + 3.5 / (40 - WARM_UP))

    def test_too_short_for_a_mean(self) -> None:
        run = a_run("x", 0.25, WARM_UP, payload_bytes=7.0)
        assert run.step_seconds is None
        assert run.items_per_second is None

    def test_losses_between_evaluations(self) -> None:
        run = a_run("x", 0.5, 40, payload_bytes=7.0)
        assert run.loss_at(7.5) == pytest.approx(10 - 1.5)
        assert run.loss_at(20) == pytest.approx(6)
        assert run.loss_at(21) is None
        assert run.loss_at(1) is None
        assert run.time_to(8.5) == pytest.approx(7.5)
        assert run.time_to(5) is None
        assert run.steps_by(7.6) == 15

    def test_exposed_is_what_communication_adds(self) -> None:
        slow, compute = a_run("x", 0.25, 40, payload_bytes=7.0), a_run("y", 0.1, 40, payload_bytes=0.0)
        assert exposed_seconds(slow, compute) == pytest.approx(0.15)
        assert exposed_seconds(compute, slow) == 0

    def test_progress(self) -> None:
        run = a_run("x", 0.25, 40, payload_bytes=7.0)
        run.goal_steps, run.goal_seconds = 80, 100.0
        assert run.progress == pytest.approx(0.5)
        run.goal_seconds = 12.5
        assert run.progress == pytest.approx(0.8)
        run.state = "done"
        assert run.progress == 1


class TestReport:
    def test_optimizers_are_named_where_they_differ(self) -> None:
        compute, ddp, gossip = (a_run(title, 0.1, 40, payload_bytes=7.0) for title in ("compute", "DDP", "Gossip"))
        for run, name in ((ddp, "AdamW"), (gossip, "AdamW")):
            run.header["optimizer"] = name
        assert "Trained:" not in Report("hosts", compute, [ddp, gossip], []).markdown()
        gossip.header["optimizer"] = "GossipAdamW"
        text = Report("hosts", compute, [ddp, gossip], []).markdown()
        assert "Trained: DDP with AdamW, Gossip with GossipAdamW. Where weights travel, the validation loss is that of" in text

    @pytest.fixture
    def report(self) -> Report:
        compute = a_run("computing alone", 0.1, 40, payload_bytes=0.0)
        runs = [a_run("DDP", 0.4, 40, payload_bytes=6e6), a_run("ours", 0.1, 200, payload_bytes=2e6, exposed_seconds=0.01)]
        return Report("four hosts", compute, runs, ["a note"])

    def test_rows(self, report: Report) -> None:
        rows = dict(report.rows())
        assert rows["step time"] == ["400 ms", "100 ms"]
        assert rows["exposed communication per step"] == ["300 ms", "0 ms"]
        assert rows["payload per step and worker"] == ["6.00 MB", "2.00 MB"]
        assert rows["sent through the host's interface per step"] == ["not measured", "not measured"]
        assert rows["validation loss after 16 s"] == ["6.000", "-6.000"]
        assert rows["time to validation loss 6.000"] == ["16.0 s", "4.0 s"]

    def test_sooner_is_counted_to_when_the_first_had_that_loss(self, report: Report) -> None:
        """It had 6.5 after 11 s, and has it again at the end: the arrow ends where the table says that it got there."""
        assert report._sooner() == Sooner(6.0, pytest.approx(4.0), pytest.approx(16.0))
        for index, loss in ((-2, 6.0), (-1, 6.5)):
            report.runs[0].evaluations[index]["validation_loss"] = loss
        assert dict(report.rows())["time to validation loss 6.500"] == ["11.0 s", "3.5 s"]
        assert report._sooner() == Sooner(6.5, pytest.approx(3.5), pytest.approx(11.0))

    def test_markdown_has_every_row_and_note(self, report: Report) -> None:
        lines = report.markdown().splitlines()
        table = [line for line in lines if line.startswith("|")]
        assert len(table) == 2 + len(report.rows())
        assert {line.count("|") for line in table} == {4}
        assert lines[-1] == "a note"
        assert "10 ms per step with ours" in report.markdown()
        assert "its payload is computed" not in report.markdown()
        report.runs[0].name = "ddp"
        assert "its payload is computed" in report.markdown()

    def test_picture(self, report: Report, tmp_path: Path) -> None:
        report.draw(tmp_path / "new" / "picture.png")
        assert (tmp_path / "new" / "picture.png").read_bytes().startswith(b"\x89PNG")


class TestOptions:
    def options(self, *arguments: str) -> Any:
        return demo.parse_options(arguments)

    def test_time_is_the_limit_unless_steps_are_given(self) -> None:
        timed = demo.make_run("gossip:fp16", self.options("--seconds", "7"))
        assert timed.title == "gossamer Gossip, fp16"
        assert timed.goal_seconds == 7
        assert timed.arguments[-2:] == ("--seconds", "7.0")
        assert timed.arguments[:4] == ("--method", "gossip", "--wire", "fp16")
        counted = demo.make_run("ddp", self.options("--steps", "9"))
        assert counted.goal_steps == 9
        assert counted.goal_seconds == math.inf
        assert "--seconds" not in counted.arguments

    def test_an_unknown_method(self) -> None:
        with pytest.raises(DemoError, match=r"unknown method 'dpp'; known: none, ddp, allreduce, "):
            demo.make_run("dpp", self.options())

    def test_only_our_traffic_can_be_shaped(self) -> None:
        options = self.options()
        runs = [demo.make_run(method, options) for method in options.methods]
        assert "stands in its place" in demo.stand_in(runs, options)[0]
        assert runs[0].title == "exact all-reduce, in DDP's place"
        assert runs[0].arguments[:4] == ("--method", "allreduce", "--wire", "fp32")
        assert demo.stand_in(runs, options) == []


@pytest.mark.processes
class TestWhole:
    def test_tiny(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        monkeypatch.chdir(tmp_path)
        arguments = ["--hosts", "2", "--rate", "1gbit", "--steps", "6", "--eval-every", "3", "--save-to", "assets"]
        assert demo.main(arguments) == 0
        output = capsys.readouterr().out
        assert "assets/demo.png" in output
        assert "gossamer Gossip, bf16: done" in output
        assert (tmp_path / "assets" / "demo.png").stat().st_size > 10_000
        table = (tmp_path / "assets" / "demo.md").read_text()
        assert "2 emulated hosts, 1000 Mbit/s each" in table
        assert "gossamer Gossip, bf16" in table
        logs = sorted((tmp_path / "out" / "demo").glob("*.jsonl"))
        shaped = "DDP's traffic cannot be shaped here" not in table + output
        second = "1-ddp.jsonl" if shaped else "1-allreduce-fp32.jsonl"
        assert [log.name for log in logs] == ["0-none.jsonl", second, "2-gossip-bf16.jsonl"]
        assert len(logs[1].read_text().splitlines()) == 1 + 6 + 2

    def test_a_rank_that_fails(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        script = tmp_path / "broken.py"
        script.write_text("import os\nif os.environ['RANK'] == '1': raise ValueError('the disk is full')\n")
        monkeypatch.setattr(demo_run, "SCRIPT", script)
        monkeypatch.chdir(tmp_path)
        assert demo.main(["--hosts", "2"]) == 1
        error = capsys.readouterr().err
        assert "computing alone: rank 1 on host 1 failed with exit code 1" in error
        assert "ValueError: the disk is full" in error
        assert not (tmp_path / "out" / "demo" / "demo.png").exists()

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [(["--rate", "200"], "write 200mbit"), (["--methods", "dpp"], "unknown method"), (["--hosts", "0"], "hosts is 0")],
    )
    def test_bad_options(self, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert demo.main(arguments) == 1
        assert message in capsys.readouterr().err
