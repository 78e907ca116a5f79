"""Foresight: every committed step time beside what ``step_time`` predicts for it, and how far apart they are.

python -m benchmarks.studies.foresight
python -m benchmarks.studies.foresight benchmarks/results/bounds --every-row

A prediction is made of the model, the method, compute alone and the rate of plain TCP in the same run, and nothing else: no
row is fitted. Of emulated models the profile of the layers is known. Of others it is taken to be uniform: forward takes a
third of compute alone, and gradients come in proportion to their sizes.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.studies.harness import console
from gossamer.bench.cases import is_measured
from gossamer.bench.catalogue import find_workload
from gossamer.bench.emulated import FORWARD, Emulated
from gossamer.bench.methods import Method, algorithm_of, optimizer_of, overlaps_forward, parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.rows import Record, markdown, read_rows
from gossamer.simulate import Compute, Link, step_time
from gossamer.simulate.run import like

RESULTS = Path(__file__).parent.parent / "results"


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
    def kind(self) -> str:
        """The group of rows of which the distances are told together."""
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


def profile(model: nn.Module, compute_seconds: float) -> Compute:
    """When what is computed, of a step that computes for so long."""
    if isinstance(model, Emulated):
        layers = model.profile()
        rest = max(0.0, compute_seconds - sum(map(sum, layers.values())))
        return Compute.layered(model, layers, optimizer=rest)
    return Compute.uniform(model, forward=FORWARD * compute_seconds, backward=(1 - FORWARD) * compute_seconds)


def predict(row: Record) -> float:
    """Seconds per step."""
    method: Method = parse_method(row["method"])
    workload = find_workload(row["workload"])
    model = workload.build_model()
    usual = workload.build_optimizer(model)
    link = Link(bandwidth=row["tcp_bits_per_second"] or float("inf"), latency=latency_of(row))
    found = step_time(
        model.to("meta"),
        algorithm_of(method),
        world=row["hosts"],
        link=link,
        compute=profile(model, row["compute_seconds"]),
        optimizer=optimizer_of(method) or like(usual),
        ranks_per_node=1,  # every emulated host has a link of its own
        overlap_forward=overlaps_forward(method),
    )
    return found.step_seconds


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
    high = errors[min(len(errors) - 1, int(0.95 * len(errors)))]
    mean = sum(point.error for point in found) / len(found)
    return [
        kind,
        str(len(found)),
        *(f"{100 * each:.1f} %" for each in (median(errors), high, errors[-1])),
        f"{100 * mean:+.1f} %",
    ]


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
    lines = [*summary(found), *(["", *rows_of(found)] if options.every_row else [])]
    if not options.folders:
        (RESULTS / "foresight.md").write_text("\n".join([*summary(found), "", *rows_of(found)]) + "\n")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
