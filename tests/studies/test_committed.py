"""Every committed table says what its program makes of the committed measurements."""

import json
import shlex
import subprocess
from pathlib import Path

import pytest

from benchmarks.studies import (
    convergence,
    exchanges,
    kernels,
    overhead,
    scale,
    shuffle_time,
    speed,
    threads,
    time_to_quality,
)
from benchmarks.studies.readme import TABLES, insert
from gossamer.bench import matrix
from gossamer.bench.rows import read_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
MATRICES = sorted(path.parent.name for path in RESULTS.glob("*/results.jsonl"))


def lines(table):
    return "\n".join(table) + "\n"


@pytest.mark.parametrize("name", MATRICES)
def test_tables_of_gossamer_bench(name):
    assert (RESULTS / name / "results.md").read_text() == lines(matrix.table(read_rows(RESULTS / name / "results.jsonl")))


def test_all_of_them_are_checked():
    assert {"bounds", "efficiency", "hosts", "peers", "relaxations"} <= set(MATRICES)


@pytest.mark.parametrize("name", ["convergence", "shuffle"])
def test_tables_of_quality(name):
    assert (RESULTS / f"{name}.md").read_text() == lines(convergence.table(read_rows(RESULTS / f"{name}.jsonl")))


def test_every_row_of_convergence_is_one_that_make_asks_for(monkeypatch):
    monkeypatch.chdir(ROOT)
    commands = subprocess.run(["make", "-n", "bench-convergence"], capture_output=True, text=True, check=True).stdout
    words = [shlex.split(line, comments=True) for line in commands.replace("\\\n", " ").splitlines()]
    module = "benchmarks.studies.convergence"
    lines = [convergence.make_parser().parse_args(line[line.index(module) + 1 :]) for line in words if module in line]
    keys = [run.key() for line in lines for run in convergence.asked_for(line)[1]]
    for row in read_rows(RESULTS / "convergence.jsonl"):
        key = {name: row[name] for name in row if name in convergence.Training.__dataclass_fields__}
        assert key in keys, f"no command of make bench-convergence trains {key}"


def test_overhead_and_threads():
    assert (RESULTS / "overhead.md").read_text() == overhead.page(read_rows(RESULTS / "overhead.jsonl"))
    assert (RESULTS / "threads.md").read_text() == lines(threads.table(read_rows(RESULTS / "threads.jsonl")))


def test_shuffle_time():
    rows = json.loads((RESULTS / "shuffle-time.json").read_text())
    assert (RESULTS / "shuffle-time.md").read_text() == lines(shuffle_time.table(rows))


@pytest.mark.parametrize(
    ("program", "stem", "keys"),
    [
        (exchanges, "exchanges", {"exchanges"}),
        (kernels, "kernels", {"machine", "kernels"}),
        (speed, "speed", {"machine", "steps"}),
    ],
)
def test_tables_of_one_run(program, stem, keys):
    saved = json.loads((RESULTS / f"{stem}.json").read_text())
    assert (RESULTS / f"{stem}.md").read_text() == program.page(saved)
    assert saved.keys() == keys, "nothing that it does not write"


def test_the_short_table_of_speed():
    assert (RESULTS / "speed-summary.md").read_text() == speed.page(json.loads((RESULTS / "speed.json").read_text()), True)


@pytest.mark.parametrize(
    ("folder", "stem"),
    [(".", "convnet"), (".", "gpt"), ("quality-beside", "gpt"), ("quality-slower", "gpt"), ("quality-hooks", "gpt")],
)
def test_times_to_quality(folder, stem, monkeypatch):
    monkeypatch.chdir(ROOT)
    rows = [row for row in read_rows(RESULTS / folder / "quality.jsonl") if row["workload"].endswith(f"{stem}.py")]
    first = {row["seed"]: row for row in rows if row["method"] == "ddp"}
    targets = {seed: 0.905 if stem == "convnet" else time_to_quality.target_after(row, 300.0) for seed, row in first.items()}
    found = (RESULTS / folder / f"{stem}-quality.md").read_text().splitlines()
    # Methods stand there in the order in which they were asked for.
    assert sorted(found) == sorted(time_to_quality.page(rows, targets))


def test_scale():
    rows = read_rows(RESULTS / "scale" / "results.jsonl")
    assert (RESULTS / "scale" / "scale.md").read_text() == lines(scale.table(scale.points(rows)))


@pytest.mark.parametrize("table", TABLES)
def test_the_readme_has_them_too(table):
    readme = (ROOT / "README.md").read_text()
    assert insert(readme, Path(table).stem, (ROOT / table).read_text()) == readme
