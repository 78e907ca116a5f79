"""Choice: the method that a plan chooses, beside the best that was measured, on the committed networks.

python -m benchmarks.studies.choice

Every method that was measured is predicted from compute alone and the rate of plain TCP in the same run, and from rates 0.8 and
1.25 times as high: alone, as ``gossamer plan`` predicts; and as ``replicate(fidelity=)`` does, which has seen steps of plain
all-reduce (DDP's, where those were not measured): they correct the rate, and what is chosen is tried, up to three methods, of
which the best stays. What a method on trial takes is what was measured of it. A choice is right if it took at most 8 % longer
than the fastest of its class, or of a more exact one, in the same measurement. Only the step counts here, not the number of
steps. Nothing is fitted, no row is left out, and the processor that hosts share is that of ``benchmarks/results/foresight.md``.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
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
from gossamer.planning.choose import HIDDEN, PLAIN, Row, choose
from gossamer.planning.chooser import TRIALS
from gossamer.planning.correction import MOST

FOLDERS = ("bounds", "memory", "residuals", "relaxations", "scale")
"""Suites that measured several methods of gossamer beside each other."""

LINES = (0.8, 1.0, 1.25)
"""By which factor the rate is wrong."""

RIGHT = 1.08

TOGETHER = ("folder", "workload", "network", "hosts")
"""What rows that were measured together have in common."""


@dataclass(frozen=True, eq=False)
class Condition:
    """What was measured together: the rows by method, and the class of each."""

    folder: str
    rows: tuple[tuple[Record, Fidelity], ...]
    plain: Record
    """Plain all-reduce, or DDP."""

    @property
    def name(self) -> Record:
        """What its rows have in common."""
        return {"folder": self.folder} | {name: self.plain[name] for name in TOGETHER[1:]}

    @cached_property
    def factor(self) -> float | None:
        """By which the rate of plain TCP is multiplied where the step of plain all-reduce is predicted to take as long as it
        took; None where it hid the network."""
        if self.plain["step_seconds"] <= HIDDEN * self.plain["compute_seconds"]:
            return None
        low, high = 0.4, 2.5
        for _ in range(7):
            middle = (low * high) ** 0.5
            slower = predict(at_rate({**self.plain, "method": PLAIN}, middle)) > self.plain["step_seconds"]
            low, high = (middle, high) if slower else (low, middle)
        return float((low * high) ** 0.5)

    def corrected(self, line: float) -> float:
        """The factor of a rate that was measured wrong by ``line``, as a plan corrects it."""
        return line if self.factor is None else min(MOST * line, max(line / MOST, self.factor))

    def predicted(self) -> Iterator[Record]:
        """Every method at every rate, as it was measured and as it is corrected."""
        factors = {(line, seen): self.corrected(line) if seen else line for line in LINES for seen in (False, True)}
        for row, fidelity in self.rows:
            seconds = {factor: predict(at_rate(row, factor)) for factor in sorted(set(factors.values()))}
            for (line, seen), factor in factors.items():
                yield self.name | {
                    "method": row["method"],
                    "fidelity": fidelity,
                    "line": line,
                    "seen": seen,
                    "factor": factor,
                    "predicted_seconds": seconds[factor],
                    "step_seconds": row["step_seconds"],
                    "plain_seconds": self.plain["step_seconds"],
                }


def at_rate(row: Record, factor: float) -> Record:
    """The same on a line so many times as fast."""
    return {**row, "tcp_bits_per_second": factor * (row.get("tcp_bits_per_second") or float("inf"))}


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
            nodes = tuple((rank,) for rank in range(hosts))
            known = [(each.algorithm, each.fidelity) for each in candidates("loose", [optimizer], nodes)]
            own = [row for row in rows if (row["workload"], row["network"], row["hosts"]) == (workload, network, hosts)]
            classed = [(row, class_of(row["method"], known)) for row in own if "compute_seconds" in row]
            plain = next(row for name in (PLAIN, "ddp") for row in own if row["method"] == name)
            yield Condition(folder, tuple((row, each) for row, each in classed if each is not None), plain)


def judged(rows: Sequence[Record]) -> list[Record]:
    """The choice of every class of which anything was measured, at every rate, on every network."""
    found = []
    for seen in (False, True):
        for line in LINES:
            there = [row for row in rows if (row["seen"], row["line"]) == (seen, line)]
            for place in dict.fromkeys(tuple(row[name] for name in TOGETHER) for row in there):
                own = [row for row in there if tuple(row[name] for name in TOGETHER) == place]
                found += [_judged(each, fidelity) for fidelity in FIDELITIES if (each := _of_class(own, fidelity))]
    return found


def _of_class(rows: Sequence[Record], fidelity: Fidelity) -> list[Record]:
    """Those that are compared where this class is asked for; none where there is nothing to choose in it."""
    inside = [row for row in rows if within(row["fidelity"], fidelity)]
    return inside if len(inside) > 1 and any(row["fidelity"] == fidelity for row in inside) else []


def _judged(rows: Sequence[Record], fidelity: Fidelity) -> Record:
    first = rows[0]
    measured = {row["method"]: float(row["step_seconds"]) for row in rows}
    table = {row["method"]: _line(row["method"], row["fidelity"], row["predicted_seconds"]) for row in rows}
    chosen = (
        on_trial(table, measured, first["plain_seconds"], fidelity) if first["seen"] else choose([*table.values()], fidelity)
    )
    best = min(measured, key=lambda method: measured[method])
    return {name: first[name] for name in (*TOGETHER, "line", "seen", "plain_seconds")} | {
        "fidelity": fidelity,
        "methods": len(measured),
        "method": chosen.method,
        "predicted_seconds": table.get(chosen.method, chosen).step_seconds,
        "step_seconds": measured.get(chosen.method, first["plain_seconds"]),
        "best": best,
        "best_seconds": measured[best],
    }


def on_trial(table: dict[str, Row], measured: dict[str, float], plain_seconds: float, fidelity: Fidelity) -> Row:
    """The choice after steps of plain all-reduce and of the methods that are tried."""
    best = _line(PLAIN, "exact", plain_seconds)
    table, taken = {**table, PLAIN: best}, {PLAIN}
    row = choose([*table.values()], fidelity, taken=taken)
    for trial in range(1, TRIALS + 1):
        if row.method in taken:
            break
        tried = table[row.method] = replace(row, step_seconds=measured[row.method])
        taken.add(row.method)
        only_taken = trial == TRIALS or tried.seconds >= best.seconds
        row, best = choose([*table.values()], fidelity, taken=taken, only_taken=only_taken), tried
    return row


def _line(method: str, fidelity: Fidelity, seconds: float) -> Row:
    return Row(method=method, fidelity=fidelity, step_seconds=seconds, ratio=1.0, limit="", steps="", slower=1.0)


def is_right(row: Record) -> bool:
    """Whether the choice is within 8 % of the best."""
    return bool(row["step_seconds"] <= RIGHT * row["best_seconds"])


def counted(rows: Sequence[Record]) -> str:
    """How many choices are right, by class, by the error of the rate, and by what was seen; and the worst beside DDP."""
    lines, found = [], judged(rows)
    for seen, how in ((True, "As `replicate(fidelity=)` chooses"), (False, "By prediction alone")):
        told = []
        for fidelity in FIDELITIES:
            own = [row for row in found if (row["fidelity"], row["seen"]) == (fidelity, seen)]
            right = [[is_right(row) for row in own if row["line"] == line] for line in LINES]
            counts = ", ".join(f"{sum(each)} of {len(each)} at {line:g}" for line, each in zip(LINES, right, strict=True))
            told.append(f"{fidelity} {counts}")
        worst = max(row["step_seconds"] / row["plain_seconds"] for row in found if row["seen"] == seen)
        lines.append(
            f"{how}, within 8 % of the best, by the factor of the rate: {'; '.join(told)}; at most {worst:.2f} of DDP's step."
        )
    return "\n\n".join(lines)


COLUMNS = (
    Column("class", lambda row: row["fidelity"]),
    Column("workload", lambda row: row["workload"]),
    Column("network", lambda row: row["network"]),
    Column("hosts", lambda row: str(row["hosts"])),
    Column("methods", lambda row: str(row["methods"])),
    Column("rate", lambda row: f"{row['line']:g}"),
    Column("steps seen", lambda row: "yes" if row["seen"] else "no"),
    Column("chosen", lambda row: f"`{row['method']}`"),
    Column("predicted, ms", lambda row: f"{1e3 * row['predicted_seconds']:.1f}"),
    Column("measured, ms", lambda row: f"{1e3 * row['step_seconds']:.1f}"),
    Column("best", lambda row: f"`{row['best']}`"),
    Column("beside the best", lambda row: f"{row['step_seconds'] / row['best_seconds']:.3f}" + ("" if is_right(row) else " ✗")),
)


def _shown(rows: Sequence[Record]) -> list[Record]:
    """Those with the rate as it was, after steps were seen, and all that are wrong."""
    return [row for row in judged(rows) if (row["line"] == 1.0 and row["seen"]) or not is_right(row)]


STUDY = Study("choice", (*TOGETHER, "method", "line", "seen"), lambda rows: COLUMNS, _shown, counted)


def measure(options: object, store: Store) -> Iterator[Record]:
    """Predict wherever something was measured, and not predicted yet: of a network all rows or none are written."""
    torch.manual_seed(0)
    there = {tuple(row[name] for name in TOGETHER) for row in store.rows}
    for condition in conditions():
        if tuple(condition.name.values()) not in there:
            console.log(", ".join(map(str, condition.name.values())))
            yield from [*condition.predicted()]


if __name__ == "__main__":
    STUDY.main(parser_of(__doc__), measure)
