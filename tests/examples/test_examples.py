"""The examples run, alone and on two ranks, with DDP and with every algorithm."""

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gossamer.algorithms import registry
from gossamer.bench.catalogue import load_workload
from gossamer.lab import LabSpec, run_lab

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
GPT, CONVNET = EXAMPLES / "01_gpt.py", EXAMPLES / "02_convnet.py"

Run = Callable[..., list[dict[str, Any]]]


def on_two_ranks(script: Path, *arguments: str) -> list[dict[str, Any]]:
    """Run an example as two ranks of the lab; returns the records of its log."""
    lines: list[str] = []
    result = run_lab(
        LabSpec(hosts=2, shaping="none", timeout=120), [str(script), *arguments, "--log-to", "-"],
        on_line=lambda rank, stream, line: lines.append(line) if line.startswith("{") else None,
    )  # fmt: skip
    assert result.exit_code == 0, result.traceback
    return [json.loads(line) for line in lines]


@pytest.fixture
def fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dataset of the right form: random images, 300 to train on and 40 to test on."""
    source = torch.Generator().manual_seed(0)
    for part, count in (("train", 300), ("t10k", 40)):
        for kind, shape, top in (("images-idx3", (count, 28, 28), 256), ("labels-idx1", (count,), 10)):
            values = bytes(torch.randint(top, shape, generator=source).flatten().tolist())
            sizes = b"".join(size.to_bytes(4, "big") for size in shape)
            (tmp_path / f"{part}-{kind}-ubyte").write_bytes(bytes([0, 0, 8, len(shape)]) + sizes + values)
    monkeypatch.setenv("GOSSAMER_DATA", str(tmp_path))


class TestAlone:
    @pytest.mark.parametrize("method", ["none", "ddp", *(name.lower() for name in registry())])
    def test_gpt(self, run_alone: Run, method: str) -> None:
        header, *records = run_alone("01_gpt.py", "--method", method, "--steps", "2", "--eval-every", "2")
        assert header["parameters"] == 867_072
        assert [record["step"] for record in records] == [1, 2, 2]
        assert records[0]["loss"] == pytest.approx(math.log(256), abs=0.3)
        assert records[2]["validation_loss"] < records[0]["loss"]

    def test_convnet(self, run_alone: Run, fashion: None) -> None:
        header, *records = run_alone("02_convnet.py", "--epochs", "2", "--eval-every", "3")
        assert header["parameters"] == 1_630_090
        assert sum("loss" in record for record in records) == 2 * (300 // 64)
        assert [record["step"] for record in records if "accuracy" in record] == [3, 6, 8]
        assert records[-2]["items"] == 8 * 64

    @pytest.mark.alone
    def test_the_clock_stands_still_during_evaluations(self, run_alone: Run) -> None:
        _, *records = run_alone("01_gpt.py", "--steps", "3", "--eval-every", "1")
        seconds = [record["seconds"] for record in records]
        assert seconds == sorted(seconds)
        evaluations = [record for record in records if "validation_loss" in record]
        assert [record["step"] for record in evaluations] == [1, 2, 3]
        for step, evaluation in zip(records[::2], evaluations, strict=True):
            # The evaluation itself takes 30 forward passes.
            assert evaluation["seconds"] - step["seconds"] < 0.2

    def test_stops_when_the_seconds_are_over(self, run_alone: Run) -> None:
        _, *records = run_alone("01_gpt.py", "--steps", "100", "--eval-every", "2", "--seconds", "0")
        assert records[-1]["step"] == 2

    @pytest.mark.parametrize("method", ["ddp", "none"])
    def test_a_wire_that_has_no_meaning(self, run_alone: Run, method: str) -> None:
        with pytest.raises(SystemExit, match=f"not for --method {method}"):
            run_alone("01_gpt.py", "--method", method, "--wire", "bf16")

    @pytest.mark.parametrize("script", [GPT, CONVNET])
    def test_the_benchmarks_can_load_it(self, script: Path) -> None:
        workload = load_workload(script)
        model = workload.build_model()
        inputs, targets = workload.random_batch(torch.Generator().manual_seed(0))
        workload.loss(model(inputs), targets).backward()
        workload.build_optimizer(model).step()


class TestTwoRanks:
    def test_exact_all_reduce_equals_ddp(self, tmp_path: Path) -> None:
        models, records = [], []
        for method in ("ddp", "allreduce"):
            saved = tmp_path / f"{method}.pt"
            arguments = ["--method", method, "--dtype", "float64", "--steps", "3", "--eval-every", "2", "--save-to", str(saved)]
            records.append(on_two_ranks(GPT, *arguments))
            models.append(torch.load(saved))
        for name, value in models[0].items():
            torch.testing.assert_close(models[1][name], value, rtol=0, atol=1e-10)
        # Both sides report what a ring all-reduce of two sends: the gradients, once; ours also its small agreements.
        payload = [record[-1]["payload_bytes"] for record in records]
        assert payload[0] == 3 * 867_072 * 8
        assert payload[0] < payload[1] < 1.001 * payload[0]

    def test_what_changes_in_a_script_for_ddp(self, tmp_path: Path) -> None:
        """A run that is stopped and goes on ends with the same bits."""

        def run(folder: Path, *options: str) -> list[str]:
            spec = LabSpec(hosts=2, shaping="none", timeout=120)
            lines: list[str] = []
            command = [str(EXAMPLES / "00_from_ddp.py"), "--folder", str(folder), *options]
            result = run_lab(spec, command, on_line=lambda rank, stream, line: lines.append(line))
            assert result.exit_code == 0, result.traceback
            return [line for line in lines if line.startswith("epoch")]

        whole = run(tmp_path / "whole", "--epochs", "2")
        parts = run(tmp_path / "parts", "--epochs", "1") + run(tmp_path / "parts", "--epochs", "2", "--resume")
        assert whole == parts
        losses = [float(line.split()[-1]) for line in whole]
        assert losses[1] < losses[0] < math.log(256)
        models = [torch.load(tmp_path / folder / "model.pt") for folder in ("whole", "parts")]
        assert all(torch.equal(value, models[1][name]) for name, value in models[0].items())

    def test_gossip_by_torchrun(self, fashion: None, tmp_path: Path) -> None:
        log = tmp_path / "log.jsonl"
        command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(CONVNET), "--method", "gossip"]
        options = ["--wire", "fp16", "--steps", "2", "--log-to", str(log)]
        done = subprocess.run([sys.executable, *command, *options], capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        header, *records = [json.loads(line) for line in log.read_text().splitlines()]
        assert "wire='fp16'" in header["algorithm"]
        assert [record["step"] for record in records] == [1, 2, 2]
        # The exchange after the last step has begun, and may not have handed over all of its pieces yet.
        exchange = 2 * 1_630_090
        assert records[-1]["payload_bytes"] - exchange in {0, 2**20, 2 * 2**20, 3 * 2**20, exchange}
