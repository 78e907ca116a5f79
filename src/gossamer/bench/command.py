"""Bench command: ``gossamer bench``, for Typer."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gossamer.bench.in_lab import Record
from gossamer.bench.matrix import Case, Results, Turns, cases, draw, measure, portions, table
from gossamer.bench.plots import require_matplotlib
from gossamer.errors import GossamerError
from gossamer.lab import LabError

SIDES = ["AllReduce()", "ScatterReduce()", "ChunkSparse()", "Gossip(wire='bf16')"]


def bench(
    workloads: Annotated[list[str], typer.Argument(help="Python files, or emulated models such as 'ResNet50(2.0)'.")],
    network: Annotated[
        list[str] | None,
        typer.Option(help="A rate: 200mbit, unshaped; if you like with +LATENCY, /slow-link=RATE, /slow-host=FACTORx."),
    ] = None,
    hosts: Annotated[list[int] | None, typer.Option(help="Number of emulated hosts; may be given several times.")] = None,
    side: Annotated[
        list[str] | None, typer.Option(help="A way to train, beside DDP: AllReduce(), Gossip(wire='bf16').")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of every side.")] = 20,
    steps: Annotated[int, typer.Option(min=1, help="Steps of a side in its turn.")] = 5,
    warmup: Annotated[int, typer.Option(min=1, help="Steps of every side before the first turn.")] = 4,
    at_once: Annotated[int, typer.Option(min=1, help="Sides that share a run and its memory with DDP and compute only.")] = 6,
    save_to: Annotated[Path, typer.Option(help="Folder for results.jsonl, results.md and pictures.")] = Path("out/bench"),
    again: Annotated[bool, typer.Option(help="Measure anew what the folder has already.")] = False,
) -> None:
    """Time ways to train beside PyTorch DDP on emulated networks; stop and go on as you like.

    Example: gossamer bench examples/02_convnet.py --network 200mbit --network 1gbit --side "Gossip(wire='bf16')"
    """
    try:
        require_matplotlib()  # and what else comes with it; before an hour of measuring, not after
        chosen = cases(workloads, network or ["200mbit"], hosts or [4])
        results = Results(save_to / "results.jsonl")
        _run(chosen, side or SIDES, Turns(rounds, steps, warmup), at_once, results, again)
    except (GossamerError, LabError) as error:
        typer.echo(f"gossamer bench: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    (save_to / "results.md").write_text("\n".join(table(results.rows)) + "\n")
    drawn = draw(results.rows, save_to)
    typer.echo(f"{save_to / 'results.md'} and results.jsonl hold {len(results.rows)} rows" + "".join(f"; {p}" for p in drawn))


def _run(chosen: list[Case], sides: list[str], turns: Turns, at_once: int, results: Results, again: bool) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        for case in chosen:
            for portion in portions(sides if again else results.lacking(case, sides, turns), at_once):
                if not again and not results.lacking(case, portion, turns):
                    continue
                bar = progress.add_task(f"{case}: {len(portion)} sides", total=turns.rounds)

                def note(record: Record, bar: object = bar) -> None:
                    if "round" in record:
                        progress.update(bar, completed=record["round"])  # type: ignore[arg-type]

                rows = measure(case, portion, turns, note)
                results.add(rows)
                progress.remove_task(bar)
                for row in rows:
                    progress.log(f"{case}: {row['side']} {1e3 * row['step_seconds']:.1f} ms, {row['ratio']:.3f} of DDP")
