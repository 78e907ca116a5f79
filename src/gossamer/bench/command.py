"""Bench command: ``gossamer bench``, for Typer."""

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from gossamer.bench.cluster import cases_here, is_here, joined, measure_here, measure_memory_here
from gossamer.bench.conditions import busy_machine
from gossamer.bench.emulated import MODELS
from gossamer.bench.in_lab import Record
from gossamer.bench.listing import everything, listing
from gossamer.bench.matrix import (
    ALWAYS,
    RATIO,
    Case,
    Results,
    Turns,
    absent,
    cases,
    draw,
    measure,
    measure_memory,
    portions,
    table,
)  # fmt: skip
from gossamer.bench.plots import require_matplotlib
from gossamer.bench.ranks import of_all
from gossamer.bench.ratios import SPREAD, require_scipy
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.lab import LabError

SHOWN = {
    "side": "side",
    "ms per step": "ms per step",
    RATIO: "relative to DDP",
    "relative to compute": "to compute",
    "step / bound": "step / bound",
    "payload, MB": "MB",
    "memory / gradients": "memory",
}
"""Columns of the whole table that are shown on the terminal, and what they are called there, where there is less room."""

_CAPTION = f"relative to DDP: median and {SPREAD}; MB: payload of a step; memory: beyond training alone, in gradients"

ALL = "all"
"""In place of sides: everything that is listed."""

SIDES = ["AllReduce()", "ScatterReduce()", "ChunkSparse()", "Gossip(wire='bf16')"]

_WORKLOADS = f"Python files, or emulated models ({', '.join(MODELS)}) with their seconds per step, as in 'ResNet50(2.0)'."


def _list_sides(wanted: bool) -> None:
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
    side: Annotated[
        list[str] | None,
        typer.Option(
            help="A way to train, beside DDP: AllReduce(), Gossip(wire='bf16'), ddp-fp16; or all, for all that is listed."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a side in its turn.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of every side before the first turn.")] = 4,
    at_once: Annotated[int, typer.Option(min=1, help="Sides that share a run and its memory with DDP and compute only.")] = 6,
    save_to: Annotated[Path, typer.Option(help="Folder for results.jsonl, results.md and pictures.")] = Path("out/bench"),
    memory: Annotated[bool, typer.Option(help="Measure each side's peak memory too, once per number of hosts.")] = True,
    again: Annotated[bool, typer.Option(help="Measure anew what the folder has already.")] = False,
    list_sides: Annotated[
        bool, typer.Option("--list-sides", is_eager=True, callback=_list_sides, help="Show what --side can be, and leave.")
    ] = False,
) -> None:
    """Time ways to train beside PyTorch DDP on emulated networks; stop and go on as you like.

    Example: gossamer bench examples/02_convnet.py --network 200mbit --network 1gbit --side "Gossip(wire='bf16')"

    On a cluster, on the network that there is: torchrun ... -m gossamer.bench mine.py --side "Gossip(wire='bf16')"
    """
    first = os.environ.get("RANK", "0") == "0"
    try:
        require_matplotlib()  # before an hour of measuring, not after
        require_scipy()
        wanted = [each for given in side or SIDES for each in (everything() if given == ALL else [given])]
        plan = Plan(list(dict.fromkeys(wanted)), Turns(rounds, steps, warmup), at_once, memory, again)
        path = save_to / "results.jsonl"
        if first:
            save_to.mkdir(parents=True, exist_ok=True)
        if is_here():
            _on_cluster(workloads, network, hosts, plan, path)
        else:
            _run(LAB, cases(workloads, network or ["200mbit"], hosts or [4]), plan, Results(path))
    except (GossamerError, OSError) as error:
        who = "" if first else f" (rank {os.environ['RANK']})"  # the others may know nothing of it
        typer.echo(f"gossamer bench{who}: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    if first:
        _conclude(Results(path).rows, save_to)


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of every case."""

    sides: Sequence[str]
    turns: Turns
    at_once: int
    memory: bool
    again: bool

    def lacking(self, case: Case, results: Results) -> list[str]:
        """The sides that are to be measured."""
        return list(self.sides) if self.again else results.lacking(case, self.sides, self.turns)

    def portions(self, case: Case, results: Results, sides: Sequence[str], at_once: int) -> list[list[str]]:
        """``sides`` as they are to be measured together: portions of ``at_once`` of them, without those that are there."""
        return [each for each in portions(sides, at_once) if self.again or results.lacking(case, each, self.turns)]

    def apart(self, case: Case, results: Results, portion: Sequence[str]) -> list[list[str]]:
        """The portions to try in place of one that has failed; none if it cannot be taken apart."""
        own = [side for side in portion if side not in ALWAYS]
        return self.portions(case, results, own, 1) if len(own) > 1 else []


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is measured: in the lab, or where these ranks are."""

    absent: Callable[[Case, Sequence[str]], list[Record]]
    """Rows of sides that need not be tried, because they cannot run."""
    measure: Callable[[Case, Sequence[str], Turns, Callable[[Record], None]], list[Record]]
    memory: Callable[[Case, Sequence[str]], dict[str, Record]]
    separate: bool
    """Whether each is measured in processes of its own, and one that fails leaves the next unharmed."""


LAB = Place(absent, measure, measure_memory, separate=True)
# Here every rank has its own installation; they find out together when they measure.
CLUSTER = Place(lambda case, sides: [], measure_here, measure_memory_here, separate=False)


def _on_cluster(
    workloads: Sequence[str], network: Sequence[str] | None, hosts: Sequence[int] | None, plan: Plan, path: Path
) -> None:
    """Every rank goes through the same, with what the first has on its disk; only that one writes and shows."""
    if network or hosts:
        raise ConfigurationError("under torchrun hosts and network are what they are: leave --network and --hosts out")
    with joined(workloads):
        writes = dist.get_rank() == 0
        results = Results(path, writes)
        results.rows = of_all(results.rows)[0]
        _run(CLUSTER, cases_here(workloads), plan, results, quiet=not writes)


def _run(place: Place, chosen: Sequence[Case], plan: Plan, results: Results, quiet: bool = False) -> None:
    failed: list[str] = []
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=quiet) as progress:
        _say(progress, busy_machine())
        for case in chosen:
            wanted = plan.lacking(case, results)
            missing = place.absent(case, wanted)
            results.add(missing)
            _log(progress, case, missing)
            present = [side for side in wanted if side not in {row["side"] for row in missing}]
            waiting = deque(plan.portions(case, results, present, plan.at_once))
            while waiting:
                portion = waiting.popleft()
                try:
                    _log(progress, case, _measured(place, case, portion, plan, results, progress))
                except LabError:  # no other portion will run here either
                    raise
                except GossamerError as error:
                    if not place.separate:
                        raise
                    told, apart = f"{case}, {', '.join(portion)}: {error}", plan.apart(case, results, portion)
                    _say(progress, [told, "each of these sides is measured by itself now"] if apart else [told])
                    waiting.extendleft(reversed(apart))
                    failed += [] if apart else [told]
    if failed:
        raise GossamerError("what was measured is kept; this failed:\n" + "\n".join(failed))


def _measured(
    place: Place, case: Case, portion: Sequence[str], plan: Plan, results: Results, progress: Progress
) -> list[Record]:
    """The rows of sides that share a run; they are kept as soon as they are there, and once more with their memory."""
    bar = progress.add_task(f"{case}: {len(portion)} sides", total=plan.turns.rounds)

    def note(record: Record) -> None:
        if "round" in record:
            progress.update(bar, completed=record["round"])

    try:
        rows = place.measure(case, portion, plan.turns, note)
        results.add(rows)
        if plan.memory:
            progress.update(bar, description=f"{case}: memory of {len(portion)} sides", total=None)
            results.add(_with_memory(place, case, rows, {} if plan.again else results.memory(case)))
    finally:
        progress.remove_task(bar)
    return rows


def _log(progress: Progress, case: Case, rows: Sequence[Record]) -> None:
    _say(progress, [f"{case}: {row['side']} {_found(row)}" for row in rows])


def _found(row: Record) -> str:
    if "missing" in row:
        return f"not run: {row['missing']}"
    return f"{1e3 * row['step_seconds']:.1f} ms, {row['ratio']:.3f} of DDP"


def _say(progress: Progress, lines: Sequence[str]) -> None:
    for line in () if progress.disable else lines:
        progress.log(line)


def _with_memory(place: Place, case: Case, rows: Sequence[Record], known: dict[str, Record]) -> list[Record]:
    """The rows with what their sides need of memory, measured where it is not known."""
    lacking = [row["side"] for row in rows if row["side"] not in known and "missing" not in row]
    known = known | (place.memory(case, lacking) if lacking else {})
    return [row | known.get(row["side"], {}) for row in rows]


def _conclude(rows: Sequence[Record], folder: Path) -> None:
    """Show the table, and save it and the pictures."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.md").write_text("\n".join(table(rows)) + "\n")
    drawn = draw(rows, folder)
    Console().print(*_shown(rows), sep="\n")
    typer.echo(f"{folder / 'results.md'} and results.jsonl hold {len(rows)} rows" + "".join(f"; {path}" for path in drawn))


def _shown(rows: Sequence[Record]) -> Iterator[Table]:
    """For a terminal: a table for every case, with the columns that matter most."""
    for case in dict.fromkeys(Case(row["workload"], row["network"], row["hosts"]) for row in rows):
        head, _, *lines = table([row for row in rows if asdict(case).items() <= row.items()])
        places = [_cells(head).index(name) for name in SHOWN]
        shown = Table(title=str(case), title_justify="left", caption=_CAPTION, caption_justify="left")
        for name in SHOWN.values():
            shown.add_column(name, justify="left" if name == "side" else "right", no_wrap=name == "side")
        for line in lines:
            cells = _cells(line)
            shown.add_row(*(_brief(cells[place], name) for place, name in zip(places, SHOWN, strict=True)))
        yield shown


def _brief(cell: str, column: str) -> str:
    """What of a cell there is room for."""
    return cell.partition(" (")[0] if column == "relative to compute" else cell.strip("`")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
