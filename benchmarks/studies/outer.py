"""Outer: loss over bytes of methods that train alone for many steps, beside an exact all-reduce, paired by seed.

The runs are in ``outer.toml``. All workers are in one process (loopback), on one thread; the model is the GPT of
``examples/01_gpt.py``, narrower. Every run is written down when it ends, and is not done again.
"""

import argparse
import importlib.util
import statistics
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import gossamer
from benchmarks.studies.convergence import interval
from benchmarks.studies.harness import Study, console, measured_on, parser_of
from benchmarks.studies.pictures import loss_over_bytes
from gossamer.bench.methods import join, parse_method
from gossamer.bench.rows import Column, Record, Store, code, number, text
from gossamer.comm.loopback import loopback

RUNS = Path(__file__).with_suffix(".toml")
EXAMPLE = Path(__file__).parents[2] / "examples" / "01_gpt.py"

KEY = ("name", "method", "workers", "steps", "seed", "layers", "width", "batch")
FIRST = "all-reduce"
"""What all others are compared with."""


def example(layers: int, width: int, batch: int) -> ModuleType:
    """The example's module, with a model of this size."""
    sys.path.insert(0, str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("gpt_of_the_study", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS, module.WIDTH, module.BATCH = layers, width, batch
    return module  # type: ignore[no-any-return]


def train(row: Record) -> Record:
    """The validation loss of the averaged model, in nats per byte, and the bytes that a worker has sent."""
    gpt = example(row["layers"], row["width"], row["batch"])

    def body(rank: int) -> Record:
        torch.manual_seed(row["seed"])
        model = gpt.build_model()
        joined = join(parse_method(row["method"]), model, gpt.build_optimizer(model))
        for inputs, targets in islice(gpt.training_batches(rank, row["workers"], row["seed"]), row["steps"]):
            joined.step(inputs, targets, gpt.loss)
        assert joined.replica is not None
        metrics = joined.replica.metrics()
        with joined.replica.consensus():
            found = gpt.quality(model.eval()) if rank == 0 else {}
        joined.replica.close()
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return {**found, "bytes": metrics["bytes_sent"], "parameters": parameters}

    ranks = loopback(body, row["workers"])
    return ranks[0] | {"bytes": statistics.mean(rank["bytes"] for rank in ranks)}


def runs() -> Iterator[Record]:
    """All runs: every method with the first seed, then with the next one."""
    told = tomllib.loads(RUNS.read_text())
    same = {name: told[name] for name in ("workers", "steps", "layers", "width", "batch", "dense")}
    for seed in range(told["seeds"]):
        for name, method in told["methods"].items():
            yield {"name": name, "method": method, "seed": seed, **same}


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Train what is not there yet."""
    torch.set_num_threads(1)
    for run in runs():
        if store.find(**{name: run[name] for name in KEY}) is None:
            begin, used = time.perf_counter(), time.process_time()
            found = train(run)
            took = {"seconds": time.perf_counter() - begin, "processor_seconds": time.process_time() - used}
            console.log(f"{run['name']}, seed {run['seed']}: {found} ({took['processor_seconds']:.0f} s of a processor)")
            yield run | found | took | {"gossamer": gossamer.__version__, "torch": torch.__version__}


def compared(rows: Sequence[Record]) -> list[Record]:
    """Of every method, over its seeds: the mean loss, its paired difference to an all-reduce, and its share of that's bytes."""
    exact = {row["seed"]: row for row in rows if row["name"] == FIRST}
    found = []
    for name, method in dict.fromkeys((row["name"], row["method"]) for row in rows):
        own = [row for row in rows if row["method"] == method and row["name"] == name]
        pairs = [(row, exact[row["seed"]]) for row in own if row["seed"] in exact]
        found.append({
            "name": name, "method": method, "seeds": len(own), "loss": statistics.mean(row["loss"] for row in own),
            "difference": interval([row["loss"] - other["loss"] for row, other in pairs]) if pairs else "",
            "fewer": statistics.mean(other["bytes"] / row["bytes"] for row, other in pairs) if pairs else None,
            "later": statistics.mean(_without_start(other, method) / _without_start(row, method, other) for row, other in pairs)
            if pairs else None,
            "seconds": statistics.mean(row["processor_seconds"] for row in own),
        })  # fmt: skip
    return found


def _without_start(row: Record, method: str, exact: Record | None = None) -> float:
    """The bytes of a run without those of the dense start that its method begins with, which are those of an all-reduce."""
    dense = row["dense"] if method.startswith(f"after({row['dense']}, ") else 0
    return float(row["bytes"] - (exact or row)["bytes"] * dense / row["steps"])


COLUMNS = (
    Column("", text("name")),
    Column("method", code("method")),
    Column("seeds", text("seeds")),
    Column("loss, nats per byte", number("loss", "{:.3f}")),
    Column("difference to all-reduce (95 % interval)", text("difference")),
    Column("times fewer bytes", number("fewer", "{:.1f}")),
    Column("after the dense start", number("later", "{:.1f}")),
    Column("seconds of a processor per run", number("seconds", "{:.0f}")),
)


def note(rows: Sequence[Record]) -> str:
    """The size of the runs, and the machine."""
    row = rows[0]
    size = f"{row['workers']} workers, {row['steps']} steps, {row['parameters']} parameters, windows of 64 bytes, batches of "
    return f"{size}{row['batch']} per worker. {measured_on(rows)}"


def draw(rows: Sequence[Record], path: Path) -> None:
    """The loss of every method over the bytes that a worker has sent, with the spread of its seeds."""
    shown: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        shown.setdefault(row["name"], []).append((row["bytes"] / 1e6, row["loss"]))
    row = rows[0]
    title = f"Loss over bytes: {row['workers']} workers, {row['steps']} steps, {row['parameters']:,} parameters"
    loss_over_bytes(path, shown, title=title, below="MB sent per worker, the dense start included; bars: least to largest loss")


STUDY = Study("outer", KEY, lambda rows: COLUMNS, compared, note=note)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there yet, write the table, and draw it where a picture is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--picture", type=Path, help="where the loss over bytes is drawn")
    STUDY.main(parser, measure, arguments)
    options = parser.parse_args(arguments)
    if options.picture and (rows := STUDY.store(options.save_to).rows):
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
