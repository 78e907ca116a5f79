"""Bench command: ``gossamer bench``, for Typer."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, replace
from itertools import compress
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gossamer.bench.cases import Case, absent, case_of, cases, measure
from gossamer.bench.catalogue import canonical_workload, digest
from gossamer.bench.cluster import absent_here, agree, cases_here, is_here, joined, measure_here
from gossamer.bench.conditions import busy_hosts, busy_machine, here, of_hosts
from gossamer.bench.emulated import MODELS
from gossamer.bench.listing import everything, listing
from gossamer.bench.methods import parse_method
from gossamer.bench.plots import require_matplotlib
from gossamer.bench.ranks import of_all
from gossamer.bench.ratios import SPREAD, require_scipy
from gossamer.bench.results import Results
from gossamer.bench.rows import Record, days
from gossamer.bench.session import Place, Session
from gossamer.bench.suites import RESULTS as SUITE_RESULTS
from gossamer.bench.suites import SUITES, Run, find_suite
from gossamer.bench.tables import BOUND, COLUMNS, PAYLOAD, RATIO, STEP, TO_COMPUTE, aged, draw, of_rows
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.spelled import canonical

SHOWN = {STEP: STEP, RATIO: "to DDP", TO_COMPUTE: "to compute", BOUND: BOUND, PAYLOAD: "MB"}
"""Columns of the whole table that are shown on the terminal, and what they are called there, where there is less room."""

_MEANT = {
    "to DDP": f"the median of its ratios, and {SPREAD}",
    "MB": "payload of a step",
}
"""What stands in some of them."""

RESULTS = "results.jsonl"

ALL = "all"
"""In place of methods: everything that is listed."""

METHODS = ("AllReduce()", "ScatterReduce()", "ChunkSparse()", "Gossip(wire='bf16')")

OUT = Path("out/bench")

_WORKLOADS = f"Python files, or emulated models ({', '.join(MODELS)}) with their seconds per step, as in 'ResNet50(2.0)'."
_NETWORK = "A rate: 200mbit, unshaped; if you like with +LATENCY, /slow-link=RATE, /slow-host=FACTORx."
_METHOD = "A way to train, beside DDP: AllReduce(), Gossip(wire='bf16'), ddp-fp16; or all, for all that is listed."


def _list_methods(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(listing()))
        raise typer.Exit


_LISTING = typer.Option("--list-methods", is_eager=True, callback=_list_methods, help="Show what --method can be, and leave.")


def bench(
    workloads: Annotated[list[str] | None, typer.Argument(help=_WORKLOADS)] = None,
    network: Annotated[list[str] | None, typer.Option(help=_NETWORK)] = None,
    hosts: Annotated[list[int] | None, typer.Option(help="Number of emulated hosts; may be given several times.")] = None,
    method: Annotated[list[str] | None, typer.Option(help=_METHOD)] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every method.")] = Run.rounds,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a method in its turn.")] = Run.steps,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of every method before the first turn.")] = Run.warmup,
    per_run: Annotated[int, typer.Option(min=1, help="Methods in one run, beside DDP and compute.")] = Run.per_run,
    save_to: Annotated[Path | None, typer.Option(help=f"Folder for results.jsonl, results.md, pictures. [{OUT}]")] = None,
    again: Annotated[bool, typer.Option(help="Measure anew what the folder has already.")] = False,
    suite: Annotated[str | None, typer.Option(help="Measure a suite of the file of suites instead.")] = None,
    suites: Annotated[Path, typer.Option(help="The file of suites.")] = SUITES,
    list_methods: Annotated[bool, _LISTING] = False,
) -> None:
    """Time ways to train beside PyTorch DDP on emulated networks; stop and go on as you like.

    Example: gossamer bench examples/02_convnet.py --network 200mbit --network 1gbit --method "Gossip(wire='bf16')"

    On a cluster, on the network that there is: torchrun ... -m gossamer.bench mine.py --method "Gossip(wire='bf16')"
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        require_matplotlib()  # before an hour of measuring, not after
        require_scipy()
        if suite is None:
            told = Run((*(workloads or ()),), (*(network or ()),), (*(hosts or ()),), (*(method or METHODS),))
            runs = [replace(told, rounds=rounds, steps=steps, warmup=warmup, per_run=per_run)]
        elif workloads or network or hosts or method:
            raise ConfigurationError("a suite says itself what it measures: leave workloads, networks, hosts and methods out")
        else:
            runs = list(find_suite(suite, suites).runs)
        folder = save_to or (OUT if suite is None else SUITE_RESULTS / suite)
        if first:
            folder.mkdir(parents=True, exist_ok=True)
        _measure_all(list(map(_understood, runs)), folder, again)
    except (GossamerError, OSError) as error:
        who = "" if first else f" (rank {os.environ['RANK']})"  # the others may know nothing of it
        typer.echo(f"gossamer bench{who}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def _understood(run: Run) -> Run:
    """The run with workloads and methods spelled as they are compared. Raises ConfigurationError for one that is not known."""
    if not run.workloads:
        raise ConfigurationError("name a workload (a Python file, or an emulated model), or a --suite")
    methods = [canonical(each) for given in run.methods for each in (everything() if given == ALL else [given])]
    for each in (*methods, *run.always):
        parse_method(each)
    return replace(run, workloads=tuple(map(canonical_workload, run.workloads)), methods=tuple(dict.fromkeys(methods)))


LAB = Place(here, busy_machine, absent, measure, separate=True)
CLUSTER = Place(lambda: here() | of_hosts(), busy_hosts, absent_here, measure_here, separate=False)


def _measure_all(runs: Sequence[Run], folder: Path, again: bool) -> None:
    """Measure one run after the other; all of them are looked at before the first is measured."""
    if is_here():
        for run in runs:
            _on_cluster(run, folder, again)
        return
    results = Results(folder / RESULTS)
    chosen = [cases(run.workloads, run.networks or Run.networks, run.hosts or Run.hosts) for run in runs]
    failed = []
    with _concluded(folder), _progress() as progress:
        for run, own in zip(runs, chosen, strict=True):
            try:
                Session(LAB, run, results, progress, again).run(own)
            except GossamerError as error:
                failed.append(error)
                if len(runs) == 1:
                    raise
        if failed:
            raise GossamerError("\n".join(map(str, failed)))


def _on_cluster(run: Run, folder: Path, again: bool) -> None:
    """Every rank goes through the same, with what the first has on its disk; only that one writes and shows."""
    if run.networks or run.hosts:
        raise ConfigurationError("under torchrun hosts and network are what they are: leave --network and --hosts out")
    with joined(run.workloads):
        agree(
            {"workloads": run.workloads, "versions of their files": list(map(digest, run.workloads))}
            | {"options": asdict(run) | {"again": again}}
            | {"workers on its host": os.environ.get("LOCAL_WORLD_SIZE", "1")}
            | {f"version of {name}": here()[name] for name in ("gossamer", "torch")}
        )
        writes = dist.get_rank() == 0
        results = Results(folder / RESULTS, writes)
        results.rows, rows = of_all((results.rows, [astuple(case) for case in cases_here(run.workloads)]))[0]
        chosen = [Case(*row) for row in rows]
        with _concluded(folder, writes), _progress(quiet=not writes) as progress:
            Session(CLUSTER, run, results, progress, again).run(chosen)


def _progress(quiet: bool = False) -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    return Progress(*columns, console=Console(stderr=True, log_path=False), disable=quiet)


@contextmanager
def _concluded(folder: Path, shows: bool = True) -> Iterator[None]:
    """At the end, however it comes, show and save what there is."""
    try:
        yield
    finally:
        if shows and is_here():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, after another rank has failed; it waits half a minute
        rows = Results(folder / RESULTS).rows if shows else []
        if rows:
            _conclude(rows, folder)


def _conclude(rows: Sequence[Record], folder: Path) -> None:
    """Show the table, and save it and the pictures."""
    (folder / "results.md").write_text("\n".join(of_rows(rows)) + "\n")
    drawn = draw(rows, folder)
    Console().print(*_shown(rows), sep="\n")
    typer.echo(f"{folder / 'results.md'} and results.jsonl hold {len(rows)} rows" + "".join(f"; {path}" for path in drawn))


def _shown(rows: Sequence[Record]) -> Iterator[Table]:
    """For a terminal: a table for every case, with the columns that matter most."""
    rows = aged(rows)
    for case in dict.fromkeys(map(case_of, rows)):
        own = [row for row in rows if case_of(row) == case]
        shown = _fitting([_line(row) for row in own])
        meant = [f"{column.header}: {_MEANT[column.header]}" for column in shown.columns if column.header in _MEANT]
        shown.title, shown.caption = str(case), f"{days(own)} {'; '.join(meant)}".strip()
        yield shown


def _line(row: Record) -> list[str]:
    """What is shown of a row, in the columns' order; without the spread that there is no room for."""
    told = {column.title: column.cell(row) for column in COLUMNS}
    told[TO_COMPUTE] = told[TO_COMPUTE].partition(" (")[0]
    return [row["method"] + (" (another file)" if row["older"] else ""), *(told[name] for name in SHOWN)]


def _fitting(lines: Sequence[Sequence[str]]) -> Table:
    """A table without empty columns. In a narrow terminal methods go on in another line, and no figure is lost (from 80
    characters on)."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left")
    filled = [any(column) for column in zip(*lines, strict=True)]
    for name in compress(("method", *SHOWN.values()), filled):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, compress(line, filled)))
    return table
