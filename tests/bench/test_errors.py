"""What a user gets wrong is one line that names the file and the line."""

import pickle
import sys

import pytest
import torch
from typer.testing import CliRunner

import benchmarks.demo.__main__ as demo
from benchmarks.studies import convergence
from gossamer.bench.catalogue import find_workload
from gossamer.bench.emulated import MODELS
from gossamer.bench.rows import read_rows
from gossamer.cli import app
from gossamer.errors import ConfigurationError


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("page.md", "# Not Python\n", "is no Python file"),
        ("syntax.py", "import torch\n\ndef build_model(:\n", "syntax.py, line 3: invalid syntax"),
        ("lacking.py", "import torch\nimport no_such_module\n", "lacking.py, line 2: ModuleNotFoundError"),
        ("raising.py", "\n\nx = 1 / 0\n", "raising.py, line 3: ZeroDivisionError: division by zero"),
        ("few.py", "def build_model(): pass\n", "defines no random_batch.*needs build_model, random_batch"),
    ],
)
def test_a_workload_that_cannot_be_read_is_one_line(tmp_path, name, text, told):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigurationError, match=told) as caught:
        find_workload(tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_workload_needs_no_more_than_a_model_and_its_batches(tmp_path):
    (tmp_path / "two.py").write_text(
        "import torch\n"
        "def build_model(): return torch.nn.Linear(3, 2)\n"
        "def random_batch(g): return torch.rand(4, 3, generator=g), torch.randint(2, (4,), generator=g)\n"
    )
    workload = find_workload(tmp_path / "two.py")
    model = workload.build_model()
    optimizer, before = workload.build_optimizer(model), model.weight.detach().clone()
    inputs, classes = workload.random_batch(torch.Generator())
    loss = workload.loss(model(inputs), classes)
    assert loss == torch.nn.functional.cross_entropy(model(inputs), classes)
    assert workload.loss(model(inputs)[None], classes[None]) == loss, "of sequences, too"
    loss.backward()
    optimizer.step()
    assert not model.weight.equal(before)
    values = torch.rand(4, 2)
    assert workload.loss(model(inputs), values) == (model(inputs) - values).square().mean()


def test_a_workload_may_define_dataclasses_and_pickle_what_it_defines(tmp_path):
    (tmp_path / "settings.py").write_text(
        "from __future__ import annotations\nfrom dataclasses import dataclass\n"
        "@dataclass\nclass Settings:\n    width: int = 3\n"
        "def build_model(): return Settings()\ndef random_batch(g): pass\n"
    )
    made = find_workload(tmp_path / "settings.py").build_model()
    assert pickle.loads(pickle.dumps(made)) == made
    (tmp_path / "wrong.py").write_text("1 / 0\n")
    with pytest.raises(ConfigurationError):
        find_workload(tmp_path / "wrong.py")
    assert "workload_wrong" not in sys.modules


@pytest.mark.parametrize("wrong", ['{"method": "dd', "[1, 2]", "", "3"])
def test_a_file_of_results_that_was_cut_off_names_its_line(tmp_path, wrong):
    path = tmp_path / "results.jsonl"
    path.write_text(f'{{"method": "ddp"}}\n{wrong}\n')
    with pytest.raises(ConfigurationError, match=r"results.jsonl, line 2: not a whole row"):
        read_rows(path)
    result = CliRunner().invoke(app, ["bench", "Convnet(0.05)", "--save-to", str(tmp_path)])
    assert result.exit_code == 2
    assert "results.jsonl, line 2" in result.output


def test_other_programs_say_it_too(tmp_path, monkeypatch):
    (tmp_path / "convergence.jsonl").write_text("{")
    monkeypatch.setattr("sys.argv", ["convergence", "--workload", "Convnet(0.05)", "--steps", "1", "--save-to", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"convergence.jsonl, line 1"):
        convergence.main()


def test_the_help_lists_the_emulated_models():
    shown = CliRunner().invoke(app, ["bench", "--help"]).output
    assert all(name in shown for name in MODELS)


@pytest.mark.parametrize("command", [["bench", "Convnet(0.05)"], ["demo"]])
def test_a_folder_that_cannot_be_written_is_found_before_anything_is_measured(command, tmp_path, monkeypatch):
    taken = tmp_path / "taken"
    taken.write_text("a file")
    monkeypatch.chdir(tmp_path)
    if command == ["demo"]:
        assert demo.main(["--save-to", str(taken)]) == 1
    else:
        result = CliRunner().invoke(app, [*command, "--save-to", str(taken)])
        assert result.exit_code == 2
        assert "File exists" in result.output
