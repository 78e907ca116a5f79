"""Runs of a convergence table: what they are known by, and what they train with."""

import re
import sys
from dataclasses import replace

import pytest
import torch

from benchmarks.studies import convergence
from benchmarks.studies.convergence import KEY, Training, cut, train
from benchmarks.studies.training import parse_optimizer, training_of
from gossamer.bench.rows import Store
from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError

from .kept import run_all, table

TARGET = torch.tensor([[1.0, -2.0]])


def a_workload():
    """Learn two numbers; ``sizes`` of its batches are what the model was asked about."""

    def batches(rank, world, seed):
        generator = torch.Generator().manual_seed(seed * world + rank)
        while True:
            inputs = torch.randn(8, 2, generator=generator)
            yield inputs, inputs @ TARGET.T

    return Workload(
        "numbers",
        build_model=lambda: torch.nn.Linear(2, 1, bias=False),
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.2),
        random_batch=lambda generator: (torch.zeros(8, 2), torch.zeros(8, 1)),
        loss=torch.nn.functional.mse_loss,
        training_batches=batches,
        quality=lambda model: {"loss": float((model.weight.detach() - TARGET).square().sum())},
    )


def test_a_cut_batch_is_the_same_samples():
    whole = [(torch.arange(8), torch.arange(8) + 1), (torch.arange(8, 16), torch.arange(8, 16) + 1)]
    pieces = list(cut(iter(whole), 4))
    assert [len(inputs) for inputs, _ in pieces] == [2] * 8
    assert torch.cat([inputs for inputs, _ in pieces]).equal(torch.arange(16))
    assert all(targets.equal(inputs + 1) for inputs, targets in pieces)


def test_the_learning_rate_and_the_method_decide_what_is_learned():
    run = Training("numbers", "AllReduce()", 2, 20, seed=0)
    assert train(a_workload(), run)["loss"] < 1e-3
    slow = Training("numbers", "AllReduce()", 2, 20, seed=0, lr=1e-3)
    assert train(a_workload(), slow)["loss"] > 0.1


def test_another_optimizer_is_trained_with_and_told(tmp_path):
    run = Training("numbers", "AllReduce()", 2, 20, seed=0, optimizer="GossipAdamW(weight_decay=0.0)")
    assert train(a_workload(), run) != train(a_workload(), Training("numbers", "AllReduce()", 2, 20, seed=0))
    rows = run_all(a_workload(), [run], tmp_path / "runs.jsonl")
    assert rows == run_all(a_workload(), [run], tmp_path / "runs.jsonl")
    assert "| `AllReduce()`, `GossipAdamW(weight_decay=0.0)` | its own | 1 |" in table(rows)[2]


@pytest.mark.parametrize("spelled", ["Adamm()", "LAMB", "1", "GossipAdamW(learning_rate=1)"])
def test_what_is_no_optimizer_is_refused(spelled):
    with pytest.raises((ConfigurationError, TypeError)):
        parse_optimizer(spelled)(torch.nn.Linear(1, 1).parameters())


def test_rows_are_known_by_all_that_differs(tmp_path):
    log, done = tmp_path / "runs.jsonl", []

    def remembered(workload, run):
        done.append(run)
        return {"loss": run.lr or 1.0}

    runs = [Training("numbers", "AllReduce()", 2, 5, 0, lr=lr, cut=pieces) for lr in (None, 0.5) for pieces in (1, 2)]
    run_all(a_workload(), runs, log, remembered)
    rows = run_all(a_workload(), [*runs, Training("numbers", "Gossip()", 2, 5, 0)], log, remembered)
    assert done == [*runs, Training("numbers", "Gossip()", 2, 5, 0)]
    lines = table(rows)[2:]
    assert len(lines) == 5
    assert "| 0.5 | 1 | 0.500 nats of validation loss | -0.500 |" in lines[1]


def test_rows_of_another_version_of_the_file_are_neither_taken_nor_compared(tmp_path):
    log, loss = tmp_path / "runs.jsonl", iter((1.0, 2.0, 4.0, 8.0))
    exact, gossip = (Training("numbers", method, 2, 5, 0) for method in ("AllReduce()", "Gossip()"))

    def trained(workload, run):
        return {"loss": next(loss)}

    Store(log, KEY).add([exact.key() | {"quality": {"loss": 0.5}}])  # of a time when rows did not tell
    assert len(run_all(a_workload(), [exact, gossip], log, trained, "one")) == 2
    rows = run_all(a_workload(), [exact, gossip], log, trained, "another")
    assert [row.get("digest") for row in rows] == [None, "one", "another", "another"]
    assert run_all(a_workload(), [exact, gossip], log, None, "another") == rows
    assert run_all(a_workload(), [exact, gossip], log, None, "one") == rows
    cells = [[cell.strip() for cell in line.split("|")] for line in table(rows)[2:]]
    assert [line[1] for line in cells] == ["numbers (one)"] * 2 + ["numbers (another)"] * 2
    assert [line[9] for line in cells] == ["+0.000", "+0.500", "+0.000", "+2.000"]


def test_the_command_takes_no_results_of_a_file_that_has_changed(tmp_path, monkeypatch):
    path, trained = tmp_path / "numbers.py", []
    path.write_text("def build_model(): ...\ndef random_batch(generator): ...\n")

    def remembered(workload, run):
        trained.append(run)
        return {"loss": 1.0}

    real = convergence.run_all
    monkeypatch.setattr(convergence, "run_all", lambda *arguments, **more: real(*arguments, remembered, **more))
    command = ["--workload", str(path), "--steps", "1", "--seeds", "1", "--methods", "AllReduce()", "--save-to", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", ["convergence", *command])
    convergence.main()
    convergence.main()
    assert len(trained) == 1
    path.write_text(path.read_text() + "# other\n")
    convergence.main()
    assert len(trained) == 2


def test_a_model_is_evaluated_in_evaluation_mode():
    def quality(model):
        assert not any(module.training for module in model.modules())
        return {"loss": float((model[1].weight.detach() - TARGET).square().sum())}

    def build_model():
        return torch.nn.Sequential(torch.nn.Dropout(0.0), torch.nn.Linear(2, 1, bias=False))

    workload = replace(a_workload(), build_model=build_model, quality=quality)
    assert train(workload, Training("numbers", "AllReduce()", 2, 20, seed=0))["loss"] < 1e-3
    model = build_model()
    model[1].eval()
    training_of(workload)[1](model)
    assert [module.training for module in model.modules()] == [True, True, False], "as it was"


def test_what_cannot_be_trained_is_refused_before_anything_is(tmp_path, monkeypatch):
    command = ["convergence", "--workload", "AlexNet(0.01)", "--steps", "1", "--save-to", str(tmp_path)]
    command += ["--optimizer", "GossipAdamW()", "--methods", "AllReduce()"]
    for last, complaint in (
        ("with_optimizer(Gossip(), GossipAdamW())", "so does --optimizer GossipAdamW()"),
        ("Nothing()", "Nothing"),
        ("ddp", "ddp is no algorithm"),
    ):
        monkeypatch.setattr(sys, "argv", [*command, last])
        with pytest.raises(SystemExit, match=re.escape(complaint)):
            convergence.main()
    assert not list(tmp_path.iterdir())


def test_optimizers_that_communicate_are_compared_among_themselves(tmp_path):
    methods = ("AllReduce()", "OneBitAdam(warmup=9)", "Gossip()", "QAdam()")
    qualities = dict(zip(methods, (1.0, 2.0, 3.0, 5.0), strict=True))
    runs = [Training("numbers", method, 2, 5, 0) for method in methods]
    rows = run_all(a_workload(), runs, tmp_path / "runs.jsonl", lambda workload, run: {"loss": qualities[run.method]})
    differences = {line.split(" | ")[4]: line.split(" | ")[8] for line in table(rows)[2:]}
    assert differences == {
        "`AllReduce()`": "+0.000", "`Gossip()`": "+2.000", "`OneBitAdam(warmup=9)`": "+0.000", "`QAdam()`": "+3.000",
    }  # fmt: skip


def test_how_far_replicas_are_apart_is_told() -> None:
    rows = []
    for method in ("AllReduce()", "Gossip(wire='fp32', every=3)"):
        run = Training("numbers", method, 2, 20, seed=0)
        rows.append(run.key() | {"quality": train(a_workload(), run)})
    assert rows[0]["quality"]["distance"] == 0
    assert 0 < rows[1]["quality"]["distance"] < 1
    exact, gossip = table(rows)[2:]
    assert exact.endswith("| +0.000 |  |")
    assert gossip.endswith(f"| {100 * rows[1]['quality']['distance']:.2f} % |")
