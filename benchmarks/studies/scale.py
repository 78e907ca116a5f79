"""Scale: time, bytes, messages and memory per worker over the number of workers, beside what the clocked runner predicts.

The measurements are those of the suite ``scale``, of emulated models: what a layer takes is known. A prediction is made of
nothing but the model, the layers' times, the rate of plain TCP in the same run, and compute alone in the same run.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.studies.harness import RESULTS, console, parser_of
from benchmarks.studies.pictures import Measured, over_workers
from gossamer.bench.cases import ALWAYS, is_measured
from gossamer.bench.catalogue import find_workload
from gossamer.bench.emulated import Emulated
from gossamer.bench.methods import algorithm_of, optimizer_of, overlaps_forward, parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.peers import BASELINE
from gossamer.bench.rows import Column, Record, code, milliseconds, number, read_rows, table, text
from gossamer.errors import ConfigurationError
from gossamer.simulate import Compute, Link, StepTime, step_time


@dataclass(frozen=True, slots=True)
class Point:
    """One method with so many workers: its row of measurements, and what was predicted (of a peer: nothing)."""

    row: Record
    predicted: StepTime | None


def predict(row: Record, compute_seconds: float) -> StepTime | None:
    """What a step of the row's method would take, when computing alone takes ``compute_seconds``.

    None for what does not run on the clocked runner, PyTorch's own and optimizers that communicate, and of a method with
    an optimizer of its own, which may remember more or less of each weight than the workload's.

    Raises:
        ConfigurationError: the row's workload is no emulated model.
    """
    method = parse_method(row["method"])
    algorithm = algorithm_of(method)
    if algorithm is None or optimizer_of(method) is not None:
        return None
    model = find_workload(row["workload"]).build_model()
    if not isinstance(model, Emulated):
        raise ConfigurationError(f"{row['workload']}: only what an emulated model computes is known; see gossamer bench --help")
    layers = model.profile()
    rest = max(0.0, compute_seconds - sum(map(sum, layers.values())))
    latency = parse_network(row["network"]).spec(row["hosts"], waits=True).latency_s
    link = Link(bandwidth=row["tcp_bits_per_second"] or float("inf"), latency=latency)
    return step_time(
        model.to("meta"),
        algorithm,
        world=row["hosts"],
        link=link,
        compute=Compute.layered(model, layers, optimizer=rest),
        ranks_per_node=1,  # whatever the algorithm says: every emulated host has a link of its own
        overlap_forward=overlaps_forward(method),
        optimizer=partial(torch.optim.SGD, lr=0.1, momentum=0.9),  # as emulated models are trained
    )


def points(rows: Sequence[Record]) -> list[Point]:
    """Every row that was measured, in the order of methods and workers, with its prediction."""
    there = [row for row in rows if is_measured(row)]
    alone = {_case(row): row["step_seconds"] for row in there if row["method"] == BASELINE}
    lacking = sorted({str(_case(row)) for row in there} - set(map(str, alone)))
    if lacking:
        raise ConfigurationError(f"no method `compute` was measured for {lacking[0]}: measure it with gossamer bench")
    order = {method: place for place, method in enumerate(dict.fromkeys(row["method"] for row in there))}
    there.sort(key=lambda row: (row["workload"], row["network"], order[row["method"]], row["hosts"]))
    # What was measured in portions has computed alone in each of them.
    return [Point(row, predict(row, row.get("compute_seconds") or alone[_case(row)])) for row in there]


def _case(row: Record) -> tuple[str, str, int]:
    return row["workload"], row["network"], row["hosts"]


COLUMNS = (
    Column("workload", text("name")),
    Column("network", text("network")),
    Column("method", code("method")),
    Column("workers", text("hosts")),
    Column("ms per step", milliseconds("step_seconds", "{:.0f}")),
    Column("predicted", milliseconds("predicted_seconds", "{:.0f}")),
    Column("measured / predicted", number("over_prediction", "{:.3f}")),
    Column("payload, MB", number("payload_bytes", "{:.2f}", 1e-6)),
    Column("predicted, MB", number("predicted_bytes", "{:.2f}", 1e-6)),
    Column("messages", lambda row: f"{row['messages']:.1f}" if "predicted_messages" in row else ""),
    Column("predicted", number("predicted_messages")),
    Column("on the wire, MB", number("interface_bytes", "{:.2f}", 1e-6)),
    Column("CPU, ms", milliseconds("cpu_seconds", "{:.0f}")),
    Column("memory / gradients", lambda row: "" if row["method"] == BASELINE else number("memory", "{:.2f}")(row)),
)


def page(found: Sequence[Point]) -> str:
    """Markdown: what was measured beside what was predicted."""
    return "\n".join(table(COLUMNS, map(_told, found))) + "\n"


def _told(point: Point) -> Record:
    row, predicted = point.row, point.predicted
    if predicted is None:
        return row
    return row | {
        "predicted_seconds": predicted.step_seconds,
        "over_prediction": row["step_seconds"] / predicted.step_seconds,
        "predicted_bytes": predicted.bytes_per_step,
        "predicted_messages": predicted.messages_per_step,
    }


def curves(found: Sequence[Point]) -> dict[str, dict[str, Measured]]:
    """For the picture: by what is shown and by method, values over the number of workers."""
    shown: dict[str, dict[str, Measured]] = {}
    for point in found:
        row, predicted = point.row, point.predicted
        values: dict[str, tuple[float | None, float | None]] = {
            "seconds per step": (row["step_seconds"], None if predicted is None else predicted.step_seconds),
            "payload per step, MB": (
                _mega(row["payload_bytes"]),
                None if predicted is None else predicted.bytes_per_step / 1e6,
            ),
            "rounds of messages per step": (row["messages"], None if predicted is None else predicted.messages_per_step),
            "memory beyond training alone, in gradients": (row.get("memory"), None),
        }
        for name, (measured, expected) in values.items():
            if measured is None or (row["method"] in ALWAYS and name != "seconds per step"):
                continue
            curve = shown.setdefault(name, {}).setdefault(row["method"], Measured({}, {}))
            curve.measured[row["hosts"]] = measured
            if expected is not None:
                curve.predicted[row["hosts"]] = expected
    return shown


def _mega(nbytes: float | None) -> float | None:
    return None if nbytes is None else nbytes / 1e6


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, and write the table and the pictures."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=RESULTS / "scale", help="where gossamer bench has saved rows")
    folder = parser.parse_args(arguments).folder
    try:
        rows = read_rows(folder / "results.jsonl")
        if not rows:
            raise SystemExit(f"no measurements in {folder / 'results.jsonl'}: take some by gossamer bench --suite scale")
        found = points(rows)
    except ConfigurationError as error:
        raise SystemExit(str(error)) from None
    (folder / "scale.md").write_text(page(found))
    title = f"{found[0].row['name']}, {found[0].row['network']}: per worker, over the number of workers"
    over_workers(folder / "scale.png", curves(found), title=title)
    console.log(f"wrote {folder / 'scale.md'} and {folder / 'scale.png'}")


if __name__ == "__main__":
    main()
