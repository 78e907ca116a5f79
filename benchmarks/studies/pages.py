"""Pages: puts the tables of the committed results into README.md and benchmarks/README.md, between markers."""

import re
import shlex
from collections.abc import Sequence
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO
from pathlib import Path
from unittest.mock import patch

from benchmarks.studies.harness import console, parser_of
from gossamer.algorithms import Algorithm
from gossamer.bench.cases import is_measured
from gossamer.bench.methods import parse_method
from gossamer.bench.rows import days, markdown, read_rows
from gossamer.bench.suites import Suite, suites
from gossamer.bench.tables import of_rows, overview
from gossamer.cli import app
from gossamer.errors import ConfigurationError
from gossamer.planning import read_plan
from gossamer.spelled import algorithm_of

STUDIES = {
    "convergence": ("convergence.md",),
    "quality": (
        "quality/convnet-quality.md", "quality/gpt-quality.md", "quality-hooks/gpt-quality.md",
        "quality-beside/gpt-quality.md", "quality-slower/gpt-quality.md",
    ),
    "shuffle": ("shuffle.md",),
    "shuffle_time": ("shuffle_time.md",),
    "scale": ("scale/scale.md",),
    "memory": ("memory/results.md",),
    "exchanges": ("exchanges.md",),
    "kernels": ("kernels.md",),
    "overhead": ("overhead.md",),
    "threads": ("threads.md",),
    "faults": ("faults.md",),
    "hsdp": ("hsdp.md",),
    "outer": ("outer.md",),
    "outer_speed": ("outer_speed.md",),
    "choice": ("choice.md",),
    "cut": ("cut.md",),
    "fresh": ("fresh.md",),
    "switched": ("switched.md",),
    "thousands": ("thousands.md",),
    "neighbours": ("neighbours.md",),
    "foresight": ("foresight.md",),
    "published": ("published.md",),
}  # fmt: skip
"""Studies, and the tables that they write, below ``benchmarks/results``."""

TABLES = (
    "benchmarks/results/quality/convnet-quality.md",
    "benchmarks/results/quality/gpt-quality.md",
)
"""Files that README.md shows, between markers with their names."""

PLAN_OF = ("examples/02_convnet.py", "200mbit", 4)
"""Where ``benchmarks/results/plan.toml`` was made."""

PLAN_BESIDE = "relaxations"
"""The suite that has measured there."""

OUTPUTS = ("docs/pays.md", "docs/simulate.md")
"""Pages that show what predictions print."""

NETWORKS = ("200mbit", "1gbit", "unshaped")
"""The networks of which README.md shows the suite of speed."""


def insert(text: str, name: str, content: str) -> str:
    """Replace what stands between ``<!-- name -->`` and ``<!-- /name -->``. Raises if the markers are missing."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ConfigurationError(f"no markers <!-- {name} --> … <!-- /{name} --> in the text")
    return pattern.sub(lambda match: match[1] + content.strip() + "\n" + match[2], text)


def section(suite: Suite, root: Path) -> str:
    """A suite: what it is for, its command, the column that stands for it, and its pictures."""
    folder = root / "benchmarks" / "results" / suite.name
    rows, shown = read_rows(folder / "results.jsonl"), suite.show
    pictures = [f"![{suite.name}](results/{suite.name}/{path.name})\n" for path in sorted(folder.glob("*-*.png"))]
    about = f"{suite.about} `make bench SUITE={suite.name}`; [all columns](results/{suite.name}/results.md). {days(rows)}"
    return "\n".join([f"### {suite.name}\n", about.strip(), "", *overview(rows, shown), "", *pictures])


def studies_table(results: Path) -> list[str]:
    """Studies with their first sentence, their command and what there is of their results."""
    lines = []
    for name, all_files in STUDIES.items():
        files = [file for file in all_files if (results / file).exists()]
        told = (import_module(f"benchmarks.studies.{name}").__doc__ or "").split("\n")[0].partition(": ")[2]
        links = ", ".join(f"[{Path(file).stem if len(files) == 1 else file[:-3]}](results/{file})" for file in files)
        lines.append([f"`make study NAME={name}`", told.rstrip("."), links])
    return markdown(("command", "what it measures", "results"), lines)


def benchmarks_page(text: str, root: Path) -> str:
    """``benchmarks/README.md`` with the sections of all suites, and the table of studies."""
    known = suites(root / "benchmarks" / "suites.toml")
    text = insert(text, "suites", "\n".join(section(suite, root) for suite in known.values()))
    return insert(text, "studies", "\n".join(studies_table(root / "benchmarks" / "results")))


def plan_table(root: Path) -> list[str]:
    """What ``gossamer plan`` says of one network, beside what a suite has measured there; DDP is measured for all-reduce."""
    results = root / "benchmarks" / "results"
    plan = read_plan(results / "plan.toml")
    rows = [row for row in read_rows(results / PLAN_BESIDE / "results.jsonl") if is_measured(row)]
    rows = [row for row in rows if (row["workload"], row["network"], row["hosts"]) == PLAN_OF]
    measured = {
        repr(algorithm_of("AllReduce()" if row["method"] == "ddp" else row["method"])): row["step_seconds"]
        for row in rows
        if row["method"] == "ddp" or isinstance(parse_method(row["method"]), Algorithm)
    }
    head = ("method", "class", "predicted, ms", "measured, ms", "limited by", "steps")
    lines = [
        [f"`{row}`", row.fidelity, f"{1e3 * row.step_seconds:.0f}", f"{1e3 * there:.0f}", row.limit, row.steps]
        for row in plan.table
        if not row.overlap_forward and (there := measured.get(repr(algorithm_of(row.method)))) is not None
    ]
    alone = f"{1e3 * plan.facts.compute.seconds:.0f} ms when it was made, {1e3 * rows[0]['compute_seconds']:.0f} when they were"
    return [*markdown(head, lines), "", f"Its choice (`close`): `{plan.method}`. Compute alone took {alone} measured."]


def front_page(text: str, root: Path) -> str:
    """``README.md`` with the tables that it shows."""
    for table in TABLES:
        text = insert(text, Path(table).stem, (root / table).read_text())
    text = insert(text, "plan", "\n".join(plan_table(root)))
    rows = read_rows(root / "benchmarks" / "results" / "speed" / "results.jsonl")
    speed = [row for row in rows if row["network"] in NETWORKS]
    return insert(text, "speed-summary", "\n".join([*overview(speed, "relative to DDP"), "", days(speed)]))


OUTPUT = re.compile(r"(    (gossamer simulate [^\n]*)\n\n<!-- output -->\n).*?(<!-- /output -->)", re.DOTALL)


def with_outputs(text: str) -> str:
    """A page with what every ``gossamer simulate …`` prints that stands before a place for it."""
    return OUTPUT.sub(lambda match: f"{match[1]}```text\n{output_of(match[2])}```\n{match[3]}", text)


def output_of(command: str) -> str:
    """What a command prints, on a terminal of 128 columns."""
    printed = StringIO()
    with redirect_stdout(printed), patch.dict("os.environ", {"COLUMNS": "128", "NO_COLOR": "1"}):
        app(shlex.split(command)[1:], standalone_mode=False)
    return "".join(f"{line.rstrip()}\n" for line in printed.getvalue().strip().splitlines())


def write_suite(name: str, root: Path) -> None:
    """Make the table of a suite's rows anew."""
    folder = root / "benchmarks" / "results" / name
    (folder / "results.md").write_text("\n".join(of_rows(read_rows(folder / "results.jsonl"))) + "\n")


def main(arguments: Sequence[str] | None = None) -> None:
    """Write both pages, and the tables of the suites."""
    parser = parser_of(__doc__)
    parser.add_argument("--root", type=Path, default=Path(), help="the project's folder")
    root = parser.parse_args(arguments).root
    for name in suites(root / "benchmarks" / "suites.toml"):
        write_suite(name, root)
    for path, made in ((root / "README.md", front_page), (root / "benchmarks" / "README.md", benchmarks_page)):
        path.write_text(made(path.read_text(), root))
        console.log(f"wrote {path}")
    for page in OUTPUTS:
        path = root / page
        path.write_text(with_outputs(path.read_text()))
        console.log(f"wrote {path}")


if __name__ == "__main__":
    main()
