"""Bench command: ``gossamer bench``, for Typer."""

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple
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

from gossamer.bench.catalogue import canonical_workload, digest, is_of
from gossamer.bench.cluster import absent_here, agree, cases_here, is_here, joined, measure_here, measure_memory_here
from gossamer.bench.conditions import busy_hosts, busy_machine, here, of_hosts
from gossamer.bench.emulated import MODELS
from gossamer.bench.in_lab import Record
from gossamer.bench.listing import everything, listing
from gossamer.bench.matrix import (
    HEAD,
    RATIO,
    Case,
    Turns,
    absent,
    case_of,
    cases,
    cells,
    draw,
    measure,
    measure_memory,
    newest_files,
    table,
)  # fmt: skip
from gossamer.bench.methods import parse_method
from gossamer.bench.plots import require_matplotlib
from gossamer.bench.ranks import of_all
from gossamer.bench.ratios import SPREAD, require_scipy
from gossamer.bench.results import Results
from gossamer.bench.rows import days
from gossamer.bench.session import Place, Plan, Session
from gossamer.bench.spelled import canonical
from gossamer.errors import ConfigurationError, GossamerError

SHOWN = {
    "method": "method",
    "ms per step": "ms per step",
    RATIO: "to DDP",
    "relative to compute": "to compute",
    "step / bound": "step / bound",
    "payload, MB": "MB",
    "memory / gradients": "memory",
}
"""Columns of the whole table that are shown on the terminal, and what they are called there, where there is less room."""

_MEANT = {
    "to DDP": f"the median of its ratios, and {SPREAD}",
    "MB": "payload of a step",
    "memory": "beyond training alone, in gradients",
}
"""What stands in some of them."""

RESULTS = "results.jsonl"

ALL = "all"
"""In place of methods: everything that is listed."""

METHODS = ["AllReduce()", "ScatterReduce()", "ChunkSparse()", "Gossip(wire='bf16')"]

_WORKLOADS = f"Python files, or emulated models ({', '.join(MODELS)}) with their seconds per step, as in 'ResNet50(2.0)'."


def _list_methods(wanted: bool) -> None:
    if wanted:
        typer.echo("\n".join(listing()))
        raise typer.Exit


def bench(
    workloads: Annotated[list[str], typer.Argument(help=_WORKLOADS)],
    network: Annotated[
        list[str] | None,
        typer.Option(help="A rate: 200mbit, unshaped; if you like with +LATENCY, /slow-link=RATE, /slow-host=FACTORx."),
    ] = None,
    hosts: Annotated[list[int] | None, typer.Option(help="Number of emulated hosts; may be given several times.")] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help="A way to train, beside DDP: AllReduce(), Gossip(wire='bf16'), ddp-fp16; or all, for all that is listed."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every method.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a method in its turn.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of every method before the first turn.")] = 4,
    per_run: Annotated[
        int, typer.Option(min=1, help="Methods measured in one run, beside DDP and compute; fewer need less memory.")
    ] = 6,
    save_to: Annotated[Path, typer.Option(help="Folder for results.jsonl, results.md and pictures.")] = Path("out/bench"),
    memory: Annotated[bool, typer.Option(help="Measure each method's peak memory too, once per number of hosts.")] = True,
    again: Annotated[bool, typer.Option(help="Measure anew what the folder has already.")] = False,
    list_methods: Annotated[
        bool,
        typer.Option("--list-methods", is_eager=True, callback=_list_methods, help="Show what --method can be, and leave."),
    ] = False,
) -> None:
    """Time ways to train beside PyTorch DDP on emulated networks; stop and go on as you like.

    Example: gossamer bench examples/02_convnet.py --network 200mbit --network 1gbit --method "Gossip(wire='bf16')"

    On a cluster, on the network that there is: torchrun ... -m gossamer.bench mine.py --method "Gossip(wire='bf16')"
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        require_matplotlib()  # before an hour of measuring, not after
        require_scipy()
        wanted = [canonical(each) for given in method or METHODS for each in (everything() if given == ALL else [given])]
        for each in wanted:
            parse_method(each)
        workloads = list(map(canonical_workload, workloads))
        plan = Plan(list(dict.fromkeys(wanted)), Turns(rounds, steps, warmup), per_run, memory, again)
        if first:
            save_to.mkdir(parents=True, exist_ok=True)
        if is_here():
            _on_cluster(workloads, network, hosts, plan, save_to)
        else:
            results, chosen = Results(save_to / RESULTS), cases(workloads, network or ["200mbit"], hosts or [4])
            with _concluded(save_to), _progress() as progress:
                Session(LAB, plan, results, progress).run(chosen)
    except (GossamerError, OSError) as error:
        who = "" if first else f" (rank {os.environ['RANK']})"  # the others may know nothing of it
        typer.echo(f"gossamer bench{who}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


LAB = Place(here, busy_machine, absent, measure, measure_memory, separate=True)
CLUSTER = Place(lambda: here() | of_hosts(), busy_hosts, absent_here, measure_here, measure_memory_here, separate=False)


def _on_cluster(
    workloads: Sequence[str], network: Sequence[str] | None, hosts: Sequence[int] | None, plan: Plan, folder: Path
) -> None:
    """Every rank goes through the same, with what the first has on its disk; only that one writes and shows."""
    if network or hosts:
        raise ConfigurationError("under torchrun hosts and network are what they are: leave --network and --hosts out")
    with joined(workloads):
        agree(
            {"workloads": workloads, "versions of their files": list(map(digest, workloads)), "options": asdict(plan)}
            | {"workers on its host": os.environ.get("LOCAL_WORLD_SIZE", "1")}
            | {f"version of {name}": here()[name] for name in ("gossamer", "torch")}
        )
        writes = dist.get_rank() == 0
        results = Results(folder / RESULTS, writes)
        results.rows, rows = of_all((results.rows, [astuple(case) for case in cases_here(workloads)]))[0]
        chosen = [Case(*row) for row in rows]
        with _concluded(folder, writes), _progress(quiet=not writes) as progress:
            Session(CLUSTER, plan, results, progress).run(chosen)


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
    (folder / "results.md").write_text("\n".join(table(rows)) + "\n")
    drawn = draw(rows, folder)
    Console().print(*_shown(rows), sep="\n")
    typer.echo(f"{folder / 'results.md'} and results.jsonl hold {len(rows)} rows" + "".join(f"; {path}" for path in drawn))


def _shown(rows: Sequence[Record]) -> Iterator[Table]:
    """For a terminal: a table for every case, with the columns that matter most."""
    files = newest_files(rows)
    for case in dict.fromkeys(map(case_of, rows)):
        own = [row for row in rows if case_of(row) == case]
        shown = _fitting([_line(row, files.get(case.workload)) for row in own])
        meant = [f"{column.header}: {_MEANT[column.header]}" for column in shown.columns if column.header in _MEANT]
        shown.title, shown.caption = str(case), f"{days(own)} {'; '.join(meant)}".strip()
        yield shown


def _line(row: Record, file: str | None) -> list[str]:
    """What is shown of a row, in the columns' order."""
    told = dict(zip(HEAD, cells(row, file), strict=True))
    older = "" if is_of(row, file) else " (another file)"
    return [row["method"] + older, *(_brief(told[name], name) for name in [*SHOWN][1:])]


def _fitting(lines: Sequence[Sequence[str]]) -> Table:
    """A table without empty columns. In a narrow terminal methods go on in another line, and no figure is lost (from 80
    characters on)."""
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left", caption_justify="left")
    filled = [any(column) for column in zip(*lines, strict=True)]
    for name in compress(SHOWN.values(), filled):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for line in lines:
        table.add_row(*map(escape, compress(line, filled)))
    return table


def _brief(cell: str, column: str) -> str:
    """What of a cell there is room for."""
    return cell.partition(_LEFT_OUT[column])[0] if column in _LEFT_OUT else cell


_LEFT_OUT = {"relative to compute": " (", "memory / gradients": " ±"}
"""Columns whose spread is not shown, and where in a cell it begins."""
