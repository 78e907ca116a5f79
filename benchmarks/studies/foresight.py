"""Foresight: every committed step time beside what ``step_time`` predicts for it, and how far apart they are.

python -m benchmarks.studies.foresight
python -m benchmarks.studies.foresight benchmarks/results/bounds --every-row

A prediction is made of the model, the method, compute alone and the rate of plain TCP in the same run, and of one processor,
which the emulated hosts share. Its three figures come from the rows of one network (``CALIBRATION``), and of them only from the
seconds of processor that they took beyond compute alone: no step time is fitted, and these rows are not judged. Of emulated
models the profile of the layers is known, and what they compute takes no processor. Of others compute alone is divided by the
arithmetic of their layers, as ``gossamer simulate`` does.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

import numpy as np
import torch
from scipy.optimize import nnls
from torch import nn

from benchmarks.studies.harness import console
from gossamer.bench.cases import is_measured
from gossamer.bench.catalogue import find_workload, is_emulated
from gossamer.bench.emulated import Emulated
from gossamer.bench.methods import Method, algorithm_of, optimizer_of, overlaps_forward, parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.rows import Record, markdown, read_rows
from gossamer.simulate import Cluster, Compute, Link, Machines, Processor, StepTime, step_time
from gossamer.simulate.counted import count_step
from gossamer.simulate.run import MakeOptimizer, like

RESULTS = Path(__file__).parent.parent / "results"

CALIBRATION = "relaxations", "1gbit"
"""Folder and network of the rows that the processor is calibrated on."""


@dataclass(frozen=True, slots=True)
class Point:
    """A row, its folder, and seconds per step: measured, and predicted."""

    folder: str
    row: Record
    predicted: float

    @property
    def measured(self) -> float:
        return float(self.row["step_seconds"])

    @property
    def error(self) -> float:
        """Relative to what was measured."""
        return self.predicted / self.measured - 1

    @property
    def calibrates(self) -> bool:
        """Whether the processor was calibrated on it: then it is not judged."""
        return (self.folder, self.row["network"]) == CALIBRATION

    @property
    def condition(self) -> tuple[str, ...]:
        """What was measured together."""
        return (self.folder, *(str(self.row[name]) for name in ("workload", "network", "hosts")))

    @property
    def kind(self) -> str:
        """The group of rows of which the distances are told together."""
        if self.calibrates:
            return "calibrating the processor"
        if "overlap_forward" in self.row["method"]:
            return "overlap_forward"
        return "emulated compute" if "(" in self.row["workload"] else "real compute"


def predictable(row: Record) -> bool:
    """Whether a row was measured, by a method of gossamer, on hosts and links that are all alike."""
    if not is_measured(row) or "/" in row["network"] or "compute_seconds" not in row:
        return False
    try:
        method = parse_method(row["method"])
    except Exception:
        return False  # named differently when it was measured
    return not isinstance(method, str)


@dataclass(frozen=True, slots=True)
class Known:
    """What a prediction takes of a workload: its model, on ``meta``, and what its steps compute."""

    model: nn.Module
    optimizer: MakeOptimizer
    profile: Callable[[float], Compute]
    """When what is computed, of a step that computes for so many seconds."""


@cache
def known(name: str) -> Known:
    """Of the workload of this name."""
    workload = find_workload(name)
    model = workload.build_model()
    optimizer = like(workload.build_optimizer(model))
    if isinstance(model, Emulated):
        layers = model.profile()
        passes = sum(map(sum, layers.values()))
        return Known(
            model.to("meta"),
            optimizer,
            lambda seconds: Compute.layered(model, layers, optimizer=max(0.0, seconds - passes)),
        )
    inputs, targets = (tensor.to("meta") for tensor in workload.random_batch(torch.Generator()))
    counted = count_step(model.to("meta"), (inputs,), lambda outputs: workload.loss(outputs, targets))
    return Known(model, optimizer, counted.compute)


def predict(row: Record, processor: Processor | None = None) -> float:
    """Seconds per step. ``processor``: by default the one that was calibrated."""
    return predicted(row, processor or calibrated()).step_seconds


def predicted(row: Record, processor: Processor) -> StepTime:
    """All that is predicted. Every emulated host has a link of its own, and all of them share the ``processor``."""
    method: Method = parse_method(row["method"])
    workload = known(row["workload"])
    cluster = Cluster(
        machines=Machines(count=row["hosts"]),
        between=Link(bandwidth=row["tcp_bits_per_second"] or float("inf"), latency=latency_of(row)),
        processor=replace(processor, cores=row["cores"], machines=row["hosts"], computes=not is_emulated(row["workload"])),
    )
    return step_time(
        workload.model,
        algorithm_of(method),
        cluster=cluster,
        compute=workload.profile(row["compute_seconds"]),
        optimizer=optimizer_of(method) or workload.optimizer,
        overlap_forward=overlaps_forward(method),
    )


@cache
def calibrated() -> Processor:
    """The copies, bytes and messages that explain best, by least squares, which processor time the calibrating rows took.

    A prediction's processor time is the sum of the three, each in proportion to the inverse of its figure.
    """
    folder, network = CALIBRATION
    rows = [row for row in read_rows(RESULTS / folder / "results.jsonl") if row["network"] == network]
    alone = next(row["cpu_seconds"] for row in rows if row["method"] == "compute")
    rows = list(filter(predictable, rows))
    units = Processor(copy=1.0), Processor(transport=1.0), Processor(message=1.0)
    taken = [[predicted(row, unit).processor_seconds for unit in units] for row in rows]
    copy, transport, message = nnls(taken, [row["cpu_seconds"] - alone for row in rows])[0]
    return Processor(copy=1 / copy, transport=1 / transport, message=message)


def latency_of(row: Record) -> float:
    return parse_network(row["network"]).spec(row["hosts"], waits="(" in row["workload"]).latency_s


def points(folders: Sequence[Path]) -> Iterator[Point]:
    """Of every row that can be predicted."""
    for folder in folders:
        for row in filter(predictable, read_rows(folder / "results.jsonl")):
            with console.status(f"{folder.name}: {row['workload']} on {row['network']}, {row['method']}"):
                yield Point(folder.name, row, predict(row))


def summary(found: Sequence[Point]) -> list[str]:
    """Markdown: the distances of each kind of rows."""
    head = ("rows", "number", "median error", "95th percentile", "worst", "mean of errors with their sign")
    kinds = dict.fromkeys(point.kind for point in found)
    return markdown(head, [_distances(kind, [point for point in found if point.kind == kind]) for kind in sorted(kinds)])


def _distances(kind: str, found: Sequence[Point]) -> list[str]:
    errors = sorted(abs(point.error) for point in found)
    high = np.percentile(errors, 95)
    mean = sum(point.error for point in found) / len(found)
    return [
        kind,
        str(len(found)),
        *(f"{100 * each:.1f} %" for each in (median(errors), high, errors[-1])),
        f"{100 * mean:+.1f} %",
    ]


def order(found: Sequence[Point]) -> str:
    """How many pairs of methods, measured together and more than 10 % apart, are predicted in their order."""
    pairs = [
        pair
        for pair in combinations([point for point in found if not point.calibrates], 2)
        if pair[0].condition == pair[1].condition and not 1 / 1.1 <= pair[0].measured / pair[1].measured <= 1.1
    ]
    right = sum((one.measured < other.measured) == (one.predicted < other.predicted) for one, other in pairs)
    return f"Order of pairs that differ by more than 10 %: {right} of {len(pairs)} right ({100 * right / len(pairs):.1f} %)."


def described(processor: Processor) -> str:
    """The processor that was calibrated, and on what."""
    folder, network = CALIBRATION
    return (
        f"Processor, calibrated on the {network} rows of {folder}: copies {processor.copy / 1e9:.2f} GB/s, network "
        f"{processor.transport / 1e9:.2f} GB/s, {1e3 * processor.message:.2f} ms a message."
    )


def rows_of(found: Sequence[Point]) -> list[str]:
    """Markdown: every row, the farthest first."""
    head = ("folder", "workload", "network", "hosts", "method", "measured, ms", "predicted, ms", "error")
    return markdown(
        head,
        [
            [
                point.folder, point.row["workload"], point.row["network"], str(point.row["hosts"]), f"`{point.row['method']}`",
                f"{1e3 * point.measured:.1f}", f"{1e3 * point.predicted:.1f}", f"{100 * point.error:+.1f} %",
            ]
            for point in sorted(found, key=lambda point: -abs(point.error))
        ],
    )  # fmt: skip


def main() -> None:
    """Print the table of distances, and on demand that of all rows; of all folders, both are the page of the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="*", type=Path, help="folders of results; all that are committed by default")
    parser.add_argument("--every-row", action="store_true", help="the table of all rows as well, the farthest first")
    options = parser.parse_args()
    torch.manual_seed(0)
    folders = options.folders or sorted(path.parent for path in RESULTS.glob("*/results.jsonl"))
    found = list(points(folders))
    told = [*summary(found), "", order(found), described(calibrated())]
    lines = [*told, *(["", *rows_of(found)] if options.every_row else [])]
    if not options.folders:
        (RESULTS / "foresight.md").write_text("\n".join([*told, "", *rows_of(found)]) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
