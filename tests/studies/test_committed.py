"""Every committed table says what its program makes of the committed rows, and every row is one that a command measures."""

from importlib import import_module
from pathlib import Path

import pytest

from benchmarks.studies import convergence, pages, quality, quality_table, scale
from gossamer.bench import tables
from gossamer.bench.rows import read_rows
from gossamer.bench.suites import suites
from gossamer.spelled import canonical

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"
SUITES = suites(ROOT / "benchmarks" / "suites.toml")
STUDIES = (
    "convergence", "cut", "exchanges", "fresh", "hsdp", "kernels", "outer", "overhead", "shuffle", "shuffle_time", "switched",
    "thousands", "threads",
)  # fmt: skip


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("name", SUITES)
def test_tables_of_suites(name):
    rows = read_rows(RESULTS / name / "results.jsonl")
    assert rows
    assert (RESULTS / name / "results.md").read_text() == "\n".join(tables.of_rows(rows)) + "\n"


@pytest.mark.parametrize("name", SUITES)
def test_every_row_of_a_suite_is_one_that_it_measures(name):
    asked = {
        (workload, network, hosts, canonical(method))
        for run in SUITES[name].runs
        for workload in run.workloads
        for network in run.networks
        for hosts in run.hosts
        for method in (*run.always, *run.methods)
    }
    rows = read_rows(RESULTS / name / "results.jsonl")
    found = {(row["workload"], row["network"], row["hosts"], row["method"]) for row in rows}
    assert found <= asked, "rows that no command measures again"


def test_every_folder_of_rows_is_of_a_suite():
    assert {path.parent.name for path in RESULTS.glob("*/results.jsonl")} == set(SUITES)


@pytest.mark.parametrize("name", STUDIES)
def test_tables_of_studies(name):
    study = import_module(f"benchmarks.studies.{name}").STUDY
    rows = study.store(RESULTS).rows
    assert len(rows) == len(read_rows(RESULTS / f"{name}.jsonl")) > 0, "no two rows of one key"
    assert (RESULTS / f"{name}.md").read_text() == study.page(rows)


def test_every_row_of_convergence_is_one_that_its_file_asks_for():
    keys = [run.key() for options in convergence.listed() for run in convergence.asked_for(options)[1]]
    for row in read_rows(RESULTS / "convergence.jsonl"):
        key = {name: row[name] for name in row if name in convergence.Training.__dataclass_fields__}
        assert key in keys, f"no run of convergence.toml trains {key}"


@pytest.mark.parametrize(("name", "options"), [(name, each) for name, runs in quality.sets().items() for each in runs])
def test_times_to_quality(name, options):
    rows = [row for row in read_rows(RESULTS / name / "quality.jsonl") if row["workload"] == str(options.workload)]
    assert {row["method"] for row in rows} <= set(options.methods)
    first = {row["seed"]: row for row in rows if row["method"] == options.methods[0]}
    after = options.target_after
    targets = {seed: quality_table.target_after(row, after) if after else options.target for seed, row in first.items()}
    (page,) = (RESULTS / name).glob(f"{options.workload.stem[3:]}-quality.md")
    # Methods stand there in the order in which they were asked for.
    assert sorted(page.read_text().splitlines()) == sorted(quality_table.page(rows, targets))


@pytest.mark.slow
def test_scale():
    rows = read_rows(RESULTS / "scale" / "results.jsonl")
    assert (RESULTS / "scale" / "scale.md").read_text() == scale.page(scale.points(rows))


def test_scale_with_two_workers():
    rows = read_rows(RESULTS / "scale" / "results.jsonl")
    made = scale.page(scale.points([row for row in rows if row["hosts"] == 2])).splitlines()
    assert len(made) > 10
    assert set(made) <= set((RESULTS / "scale" / "scale.md").read_text().splitlines())


@pytest.mark.parametrize(("page", "made"), [("README.md", pages.front_page), ("benchmarks/README.md", pages.benchmarks_page)])
def test_the_pages_have_them_too(page, made):
    text = (ROOT / page).read_text()
    assert made(text, ROOT) == text
