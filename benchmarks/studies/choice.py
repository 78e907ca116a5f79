"""Choice: the method that the predicted step chooses, beside the best that was measured, on the committed networks.

python -m benchmarks.studies.choice

Of every network on which methods of a class were measured together, the choice is made from compute alone and the rate of plain
TCP in the same run, as ``gossamer plan`` chooses, and from rates 0.8 and 1.25 times as high. It is right if the method that is
chosen took at most 8 % longer than the fastest of its class, or of a more exact one, in the same measurement. Only the step
counts here, not the number of steps. Nothing is fitted, and no row is left out; processors that hosts share are not known.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from benchmarks.studies.foresight import predict
from benchmarks.studies.harness import RESULTS, Study, console, parser_of
from gossamer.algorithms import Algorithm
from gossamer.bench.cases import is_measured
from gossamer.bench.catalogue import find_workload
from gossamer.bench.methods import OverlapForward, parse_method
from gossamer.bench.rows import Column, Record, Store, read_rows
from gossamer.errors import GossamerError
from gossamer.planning.candidates import FIDELITIES, Fidelity, candidates, within
from gossamer.planning.choose import Row, choose

FOLDERS = ("bounds", "memory", "relaxations", "scale")
"""Suites that measured several methods of gossamer beside each other."""

LINES = (0.8, 1.0, 1.25)
"""By which factor the rate is wrong."""

RIGHT = 1.08


@dataclass(frozen=True)
class Condition:
    """What was measured together: the rows by method, and the class of each."""

    folder: str
    workload: str
    network: str
    hosts: int
    rows: tuple[tuple[Record, Fidelity], ...]


def class_of(method: str, known: Sequence[tuple[Algorithm, Fidelity]]) -> Fidelity | None:
    """The class of a method that a plan compares; None of any other."""
    try:
        parsed: Any = parse_method(method)
    except GossamerError:
        return None
    algorithm = parsed.algorithm if isinstance(parsed, OverlapForward) else parsed
    if not isinstance(algorithm, Algorithm):
        return None
    if "residual" in {field.name for field in fields(algorithm)}:
        algorithm = replace(algorithm, residual="bf16")  # type: ignore[call-arg]
    return next((fidelity for candidate, fidelity in known if candidate == algorithm), None)


def conditions() -> Iterator[Condition]:
    """All that are committed, in their order."""
    for folder in FOLDERS:
        rows = [row for row in read_rows(RESULTS / folder / "results.jsonl") if is_measured(row)]
        for workload, network, hosts in dict.fromkeys((row["workload"], row["network"], row["hosts"]) for row in rows):
            model = find_workload(workload).build_model()
            optimizer = find_workload(workload).build_optimizer(model)
            known = [
                (each.algorithm, each.fidelity)
                for each in candidates("loose", [optimizer], tuple((rank,) for rank in range(hosts)))
            ]
            own = [row for row in rows if (row["workload"], row["network"], row["hosts"]) == (workload, network, hosts)]
            classed = [(row, class_of(row["method"], known)) for row in own]
            yield Condition(folder, workload, network, hosts, tuple((row, each) for row, each in classed if each is not None))


def judged(condition: Condition, line: float) -> Iterator[Record]:
    """The choice of every class of which anything was measured here."""
    predicted = [
        Row(
            method=row["method"],
            fidelity=fidelity,
            step_seconds=predict({**row, "tcp_bits_per_second": line * (row.get("tcp_bits_per_second") or float("inf"))}),
            ratio=1.0,
            limit="",
            steps="",
            slower=1.0,
        )
        for row, fidelity in condition.rows
        if "compute_seconds" in row
    ]
    measured = {row["method"]: float(row["step_seconds"]) for row, _ in condition.rows}
    for fidelity in FIDELITIES:
        inside = [row for row in predicted if within(row.fidelity, fidelity)]
        if len(inside) > 1 and any(row.fidelity == fidelity for row in inside):
            yield _row(
                condition, line, fidelity, choose(inside, fidelity), {row.method: measured[row.method] for row in inside}
            )


def _row(condition: Condition, line: float, fidelity: Fidelity, chosen: Row, measured: dict[str, float]) -> Record:
    best = min(measured, key=lambda method: measured[method])
    return {
        "fidelity": fidelity,
        "folder": condition.folder,
        "workload": condition.workload,
        "network": condition.network,
        "hosts": condition.hosts,
        "line": line,
        "methods": len(measured),
        "method": chosen.method,
        "predicted_seconds": chosen.step_seconds,
        "step_seconds": measured[chosen.method],
        "best": best,
        "best_seconds": measured[best],
        "plain_seconds": measured.get("AllReduce()"),
    }


def is_right(row: Record) -> bool:
    """Whether the choice is within 8 % of the best."""
    return bool(row["step_seconds"] <= RIGHT * row["best_seconds"])


def counted(rows: Sequence[Record]) -> str:
    """How many choices are right, by class and by the error of the rate."""
    lines = []
    for fidelity in FIDELITIES:
        told = []
        for line in LINES:
            own = [row for row in rows if (row["fidelity"], row["line"]) == (fidelity, line)]
            told.append(f"{sum(map(is_right, own))} of {len(own)}" + ("" if line == 1 else f" with {line:g} of the rate"))
        lines.append(f"{fidelity}: {told[1]}; {told[0]}; {told[2]}")
    return "Within 8 % of the best: " + ". ".join(lines) + "."


COLUMNS = (
    Column("class", lambda row: row["fidelity"]),
    Column("workload", lambda row: row["workload"]),
    Column("network", lambda row: row["network"]),
    Column("hosts", lambda row: str(row["hosts"])),
    Column("methods", lambda row: str(row["methods"])),
    Column("rate", lambda row: f"{row['line']:g}"),
    Column("chosen", lambda row: f"`{row['method']}`"),
    Column("predicted, ms", lambda row: f"{1e3 * row['predicted_seconds']:.1f}"),
    Column("measured, ms", lambda row: f"{1e3 * row['step_seconds']:.1f}"),
    Column("best", lambda row: f"`{row['best']}`"),
    Column("beside the best", lambda row: f"{row['step_seconds'] / row['best_seconds']:.3f}" + ("" if is_right(row) else " ✗")),
)


def _shown(rows: Sequence[Record]) -> list[Record]:
    """Those with the rate as it was, and those that are wrong."""
    return [row for row in rows if row["line"] == 1.0 or not is_right(row)]


STUDY = Study("choice", ("fidelity", "folder", "workload", "network", "hosts", "line"), lambda rows: COLUMNS, _shown, counted)


def measure(options: object, store: Store) -> Iterator[Record]:
    """Choose wherever something was measured."""
    torch.manual_seed(0)
    there = list(conditions())
    for line in sorted(LINES, key=lambda factor: abs(factor - 1)):
        for condition in there:
            console.log(
                f"{condition.folder}: {condition.workload} on {condition.network}, {condition.hosts} hosts, rate {line:g}"
            )
            yield from judged(condition, line)


if __name__ == "__main__":
    STUDY.main(parser_of(__doc__), measure)
