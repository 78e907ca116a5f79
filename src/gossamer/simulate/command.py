"""Simulate command: ``gossamer simulate``, for Typer."""

from __future__ import annotations

import json
import logging
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gossamer import units
from gossamer._version import __version__
from gossamer.algorithms import AllReduce
from gossamer.bench.catalogue import load_workload
from gossamer.bench.methods import PLAIN, algorithm_of, optimizer_of, overlaps_forward, parse_method
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.simulate.cluster import Cluster
from gossamer.simulate.cluster_file import find_cluster, shipped, with_machines
from gossamer.simulate.devices import FORMATS, UTILISATION
from gossamer.simulate.models import MODELS
from gossamer.simulate.named import find_task
from gossamer.simulate.pictures import draw
from gossamer.simulate.profile import Compute
from gossamer.simulate.report import BASELINE, COLUMNS, Row, Way, cells, price_of, record, rows, sampled, spans_of
from gossamer.simulate.task import Task, device_of
from gossamer.simulate.trace import write_trace
from gossamer.simulate.trained import Curve
from gossamer.simulate.trained import train as trained

METHODS = ("ScatterReduce()", "Gossip(wire='bf16')", "in_parts(8, Gossip(wire='bf16'))")
METHODS_OF_NODES = ("Hierarchical(ScatterReduce())", "Hierarchical(Gossip(wire='bf16'))", METHODS[-1])
"""What is compared with DDP unless methods are named; the second ones where machines have several devices."""

_CLUSTER = f"A file, or a shipped cluster: {', '.join(shipped())}."
_MODEL = (
    f"A shipped model ({', '.join(MODELS)}), a Python file with build_model and random_batch, or a training script with its "
    "arguments: 'train.py --layers 4'."
)
_METHOD = "A way to train, beside DDP: AllReduce(), Gossip(wire='bf16') …; may be given several times."


def simulate(
    cluster: Annotated[str, typer.Argument(help=_CLUSTER)],
    model: Annotated[str, typer.Option(help=_MODEL)] = "resnet50",
    method: Annotated[list[str] | None, typer.Option(help=_METHOD)] = None,
    machines: Annotated[str | None, typer.Option(help="How many, in place of the file's: 16, or 2,4,6, or 2..128.")] = None,
    batch: Annotated[
        int | None, typer.Option(min=1, help="Samples of one device in a step; the model's usual by default.")
    ] = None,
    compute: Annotated[
        str | None, typer.Option(help="How long a step of one device computes, as in 0.3s; best measured.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="Type of the parameters and gradients: fp32, bf16, fp16.")] = "fp32",
    precision: Annotated[
        str | None,
        typer.Option(help="In what matrices are multiplied (autocast): fp32, tf32, bf16, fp16; --dtype's by default."),
    ] = None,
    utilisation: Annotated[
        float, typer.Option(help="Share of its peak that a device reaches; without --compute.")
    ] = UTILISATION,
    train: Annotated[
        int | None, typer.Option(min=1, help="Train the file's model for so many steps: loss over virtual time.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all inputs and results as JSON instead of the table.")] = False,
    save_to: Annotated[Path | None, typer.Option(help="Folder for results.json, pictures, and a trace of a step.")] = None,
) -> None:
    """Predict the step time of ways to train on a cluster that need not exist, and what limits each.

    Example: gossamer simulate rack-10gbe --model gpt2 --method "Gossip(wire='bf16')" --machines 2..16
    """
    try:
        with without_advice():
            described = sampled(find_cluster(cluster))
            clusters = [with_machines(described, count) for count in counts(machines or str(described.machines.count))]
            usual = METHODS if described.machines.devices == 1 else METHODS_OF_NODES
            ways = [way(name) for name in (BASELINE, *(method or usual))]
            seconds = None if compute is None else _positive(units.seconds(compute), "--compute")
            task = find_task(model, batch, dtype)
            profile = profiled(task, described, seconds, precision or dtype, utilisation)
            if train is not None:
                show_training(model, task, ways, clusters[-1], profile, train, as_json)
                return
            found = list(rows(task, ways, clusters, profile))
            inputs = {"gossamer": __version__, "command": shlex.join(_words(locals()))}
            told = record(task, described, profile, found, inputs)
            if save_to is not None:
                save(save_to, task, ways, clusters, profile, found, told)
            show(told, task, described, profile, found, as_json)
    except (GossamerError, OSError) as error:
        typer.echo(f"gossamer simulate: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@contextmanager
def without_advice() -> Iterator[None]:
    """Inside, gossamer logs no advice on training: it would come once for every prediction."""
    logger = logging.getLogger("gossamer")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _words(options: dict[str, Any]) -> list[str]:
    """The command as it can be given again."""
    words = ["gossamer", "simulate", options["cluster"]]
    for name in ("model", "machines", "batch", "compute", "dtype", "precision", "utilisation"):
        words += [] if options[name] is None else [f"--{name}", str(options[name])]
    return words + [word for each in options["method"] or () for word in ("--method", each)]


# -- what is asked ------------------------------------------------------------------------------------------------------


def counts(text: str) -> list[int]:
    """Numbers of machines: ``16``, ``2,4,6``, or ``2..128``, which doubles. Raises ConfigurationError."""
    try:
        low, dots, high = text.partition("..")
        if dots:
            found = [int(low)]
            while 0 < found[-1] < int(high):
                found.append(min(2 * found[-1], int(high)))
        else:
            found = [int(part) for part in text.split(",")]
    except ValueError:
        found = []
    if not found or min(found) < 1:
        raise ConfigurationError(f"--machines {text}: write a number, several (2,4,6), or a range that doubles (2..128)")
    return found


def way(name: str) -> Way:
    """A method by its name. Raises ConfigurationError."""
    if name == BASELINE:
        return Way(name=name, algorithm=AllReduce(bucket_bytes=25 * 2**20))
    method = parse_method(name)
    if isinstance(method, str):
        known = " ".join(sorted(set(PLAIN) - {BASELINE}))
        raise ConfigurationError(f"{name} is not predicted: gossamer's own methods and {BASELINE} are (not {known})")
    return Way(
        name=name, algorithm=algorithm_of(method), optimizer=optimizer_of(method), overlap_forward=overlaps_forward(method)
    )


def profiled(task: Task, cluster: Cluster, seconds: float | None, precision: str, utilisation: float) -> Compute:
    """What a step computes on a device of the cluster. Raises ConfigurationError if it does not fit there."""
    if precision not in FORMATS:
        raise ConfigurationError(f"--precision {precision}: it may be {', '.join(FORMATS)}")
    if not 0 < utilisation <= 1:
        raise ConfigurationError(f"--utilisation {utilisation}: a share of the peak, above 0 and up to 1")
    device = device_of(cluster, seconds)
    task.check_fits(device)
    return task.compute(seconds, device, precision, utilisation)


def _positive(value: float, name: str) -> float:
    if not 0 < value < math.inf:
        raise ConfigurationError(f"{name} must be above 0")
    return value


# -- what is shown ------------------------------------------------------------------------------------------------------


def show(told: dict[str, Any], task: Task, cluster: Cluster, compute: Compute, found: Sequence[Row], as_json: bool) -> None:
    """Print the table, or everything as JSON."""
    if as_json:
        typer.echo(json.dumps(told, indent=1, allow_nan=False))
        return
    typer.echo(headline(task, cluster, compute))
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("method", "limit") else "right", overflow="fold")
    for row in found:
        table.add_row(*map(escape, cells(row)), end_section=False)
    Console().print(table)


POINTS = 10
"""Lines of a table of losses."""


def show_training(
    model: str, task: Task, ways: Sequence[Way], cluster: Cluster, compute: Compute, steps: int, as_json: bool
) -> None:
    """Train with each method, and print the losses over the time that the cluster would take, as a table or as JSON."""
    if not model.endswith(".py"):
        raise ConfigurationError("--train needs data: --model must be a Python file with training_batches(rank, world, seed)")
    workload, curves = load_workload(Path(model)), []
    for each in ways:
        losses, quality = trained(workload, each, cluster.world, steps)
        seconds = price_of(task, each, compute)(cluster).step_seconds
        curves.append(Curve(method=each.name, step_seconds=seconds, losses=losses, quality=quality))
    if as_json:
        typer.echo(json.dumps([asdict(curve) for curve in curves], indent=1))
        return
    table = Table(box=SIMPLE, padding=(0, 1, 0, 0), pad_edge=False, title=f"{cluster.name}, {cluster.world} workers")
    for name in ("method", "step", "seconds", "loss", "at the end"):
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for curve in curves:
        points = curve.smoothed(POINTS)
        at_end = ", ".join(f"{name} {value:.3f}" for name, value in curve.quality.items())
        for step, end, loss in points:
            last = step == points[-1][0]
            table.add_row(
                escape(curve.method), str(step), f"{end:.1f}", f"{loss:.3f}", at_end if last else "", end_section=last
            )
    Console().print(table)


def headline(task: Task, cluster: Cluster, compute: Compute) -> str:
    """What is trained, where, and how long one device computes."""
    model = f"{task.name}: {task.parameters / 1e6:.1f} million parameters, {task.gradient_bytes / 1e6:.1f} MB of gradients"
    step = f"{task.batch} {task.samples} per device and step, which computes for {1e3 * compute.seconds:.1f} ms"
    return f"{cluster.name}\n{model}; {step}"


def save(
    folder: Path, task: Task, ways: Sequence[Way], clusters: Sequence[Cluster], compute: Compute, found: Sequence[Row],
    told: dict[str, Any],
) -> None:  # fmt: skip
    """Write everything as JSON, the pictures, and a trace of a step of each method on the largest number of machines."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps(told, indent=1, allow_nan=False) + "\n")
    largest = clusters[-1]
    draw(folder, task, ways, largest, compute, found)
    for each in ways:
        spans = spans_of(price_of(task, each, compute), largest)
        write_trace(folder / f"trace-{slug(each.name)}.json", f"{each.name} on {largest.name}", spans)


def slug(method: str) -> str:
    """A method as a part of a file's name."""
    return re.sub(r"[^A-Za-z0-9]+", "-", method).strip("-")
