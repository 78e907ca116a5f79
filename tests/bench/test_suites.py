"""Suites: what a file asks for by a name, and what is said of one that asks for something else."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from gossamer.bench.cases import ALWAYS, Case, cases
from gossamer.bench.methods import parse_method
from gossamer.bench.suites import Run, find_suite, suites
from gossamer.bench.tables import COLUMNS
from gossamer.cli import app
from gossamer.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
OURS = suites(ROOT / "benchmarks" / "suites.toml")


@pytest.mark.parametrize("name", OURS)
def test_ours_can_be_measured(name, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert any(column.title.startswith(OURS[name].show) for column in COLUMNS)
    for run in OURS[name].runs:
        assert cases(run.workloads, run.networks, run.hosts)
        for method in (*run.always, *run.methods):
            parse_method(method)


def test_what_a_suite_says_holds_for_its_runs_unless_they_say_otherwise(tmp_path):
    path = tmp_path / "suites.toml"
    path.write_text(
        '[mine]\nabout = "a"\nshow = "ms per step"\nworkloads = ["Convnet(1)"]\nrounds = 3\n'
        'runs = [{ hosts = [2] }, { networks = ["1gbit"], rounds = 5, memory = true }]\n'
    )
    first, second = find_suite("mine", path).runs
    assert first == Run(("Convnet(1)",), hosts=(2,), rounds=3)
    assert second == Run(("Convnet(1)",), networks=("1gbit",), rounds=5, memory=True)
    assert first.always == ALWAYS


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('[x]\nshow = "s"\nworkloads = ["Convnet(1)"]\n', "suite x does not say about"),
        ('[x]\nabout = "a"\nshow = "s"\n', "suite x names no workloads"),
        (
            '[x]\nabout = "a"\nshow = "s"\nworkloads = ["Convnet(1)"]\nround = 3\n',
            "suite x: round is not known; known: .*rounds",
        ),
        ("[x\n", "suites.toml: "),
        ('[y]\nabout = "a"\nshow = "s"\nworkloads = ["Convnet(1)"]\n', "has no suite 'x'; it has y"),
    ],
)
def test_a_file_that_is_not_understood_is_one_line(tmp_path, text, told):
    path = tmp_path / "suites.toml"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=told):
        find_suite("x", path)
    result = CliRunner().invoke(app, ["bench", "--suite", "x", "--suites", str(path), "--save-to", str(tmp_path)])
    assert result.exit_code == 2


def test_the_command_measures_every_run_of_a_suite(tmp_path, monkeypatch):
    from gossamer.bench import command

    seen = []
    monkeypatch.setattr(command, "Session", lambda place, run, results, progress, again: _Seen(seen, run))
    path = tmp_path / "suites.toml"
    path.write_text(
        '[mine]\nabout = "a"\nshow = "ms per step"\nworkloads = ["Convnet(1)"]\nmethods = [\'Gossip( wire="bf16")\']\n'
        'runs = [{ hosts = [2, 4] }, { networks = ["1gbit"] }]\n'
    )
    result = CliRunner().invoke(app, ["bench", "--suite", "mine", "--suites", str(path), "--save-to", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert seen == [
        (("Gossip(wire='bf16')",), [Case("Convnet(1)", "200mbit", 2), Case("Convnet(1)", "200mbit", 4)]),
        (("Gossip(wire='bf16')",), [Case("Convnet(1)", "1gbit", 4)]),
    ]
    mixed = CliRunner().invoke(app, ["bench", "Convnet(1)", "--suite", "mine", "--suites", str(path)])
    assert mixed.exit_code == 2
    assert "a suite says itself what it measures" in mixed.output


def test_nothing_to_measure_is_told(tmp_path):
    result = CliRunner().invoke(app, ["bench", "--save-to", str(tmp_path)])
    assert result.exit_code == 2
    assert "name a workload" in result.output


class _Seen:
    def __init__(self, seen, run):
        self._seen, self._run = seen, run

    def run(self, cases):
        self._seen.append((self._run.methods, cases))
