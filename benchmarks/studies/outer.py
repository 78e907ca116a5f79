"""Outer: loss over bytes of methods that train alone for many steps, beside an exact all-reduce, paired by seed.

The runs are in ``outer.toml``, in groups of one size each. All workers are in one process (loopback), on one thread; the model
is the GPT of ``examples/01_gpt.py`` in another width. Every run is written down when it ends, and is not done again; with
``--keep`` one that was cut goes on from its last checkpoint. In a group with ``shared = true`` the dense start is trained once
for each seed and inner optimizer, and kept; all runs but those in ``whole`` begin from its weights and the optimizer's state.
"""

import argparse
import importlib.util
import json
import math
import shutil
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
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

import gossamer
from benchmarks.studies.convergence import interval
from benchmarks.studies.harness import Study, console, measured_on, parser_of
from benchmarks.studies.pictures import loss_over_bytes
from gossamer.bench.methods import algorithm_of, in_place_of, optimizer_of, parse_method
from gossamer.bench.rows import Column, Record, Store, code, number, text
from gossamer.comm.loopback import loopback

RUNS = Path(__file__).with_suffix(".toml")
EXAMPLE = Path(__file__).parents[2] / "examples" / "01_gpt.py"

KEY = ("group", "name", "method", "workers", "steps", "dense", "seed", "layers", "width", "batch")
TOOK = "processor_seconds"
FIRST = "all-reduce"
"""What all others are compared with."""


def example(row: Record) -> ModuleType:
    """The example's module, with a model and batches of this size."""
    sys.path.insert(0, str(EXAMPLE.parent))
    spec = importlib.util.spec_from_file_location("gpt_of_the_study", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.LAYERS, module.WIDTH, module.BATCH = row["layers"], row["width"], row["batch"]
    module.WINDOWS = row.get("windows", module.WINDOWS)
    return module  # type: ignore[no-any-return]


def optimizers_of(row: Record, gpt: ModuleType, model: nn.Module) -> list[Optimizer]:
    """The example's AdamW, or what the method names; with ``inner = "Muon"`` that for the matrices of the blocks, at its
    rate and decay."""
    plain, named = gpt.build_optimizer(model), optimizer_of(parse_method(row["method"]))
    rate = row.get("rate", plain.param_groups[0]["lr"])
    plain.param_groups[0]["lr"] = rate
    if row.get("inner") != "Muon":
        return [plain if named is None else in_place_of(plain, named, model)]
    matrices = [parameter for name, parameter in model.named_parameters() if "blocks" in name and parameter.ndim == 2]
    known = {id(parameter) for parameter in matrices}
    rest = [parameter for parameter in model.parameters() if id(parameter) not in known]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")
    return [muon, torch.optim.AdamW(rest, lr=rate, fused=True)]


def schedules_of(row: Record, optimizers: Sequence[Optimizer], begin: int) -> list[LRScheduler]:
    """Where the row asks for it, the usual schedule: a warm-up of 100 steps, then a cosine down to a tenth of the rate."""
    steps = row["steps"]

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / 100) * (0.55 + 0.45 * math.cos(math.pi * step / steps))

    cosine = row.get("schedule") == "cosine"
    return [LambdaLR(optimizer, factor, begin - 1) for optimizer in optimizers] if cosine else []


class Checkpoints:
    """What a run that was cut goes on with: the states of all ranks at its last checkpoint, in a folder of its own."""

    def __init__(self, folder: Path | None, row: Record) -> None:
        self._folder, self._row = folder, json.dumps([row[name] for name in KEY])
        self._workers = row["workers"]

    @property
    def kept(self) -> bool:
        """Whether there is a folder for them."""
        return self._folder is not None

    def last(self) -> tuple[int, Path] | None:
        """The step of the last whole checkpoint of this run, and where it is."""
        steps = [] if self._folder is None else [int(path.name) for path in self._folder.glob("[0-9]*") if self._whole(path)]
        return (max(steps), self._folder / str(max(steps))) if self._folder and steps else None

    def _whole(self, path: Path) -> bool:
        told = path / "run"
        return told.exists() and told.read_text() == self._row and len(list(path.glob("*.pt"))) == self._workers

    def forget(self) -> None:
        """Remove them: the run has ended."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def save(self, step: int, rank: int, state: Any) -> None:
        """Keep this rank's state, and forget those of earlier steps when the last rank has written its own."""
        assert self._folder is not None
        path = self._folder / str(step)
        path.mkdir(parents=True, exist_ok=True)
        torch.save(state, path / f"{rank}.new")
        (path / f"{rank}.new").replace(path / f"{rank}.pt")
        (path / "run").write_text(self._row)
        if self._whole(path):
            for other in self._folder.glob("[0-9]*"):
                if other != path:
                    shutil.rmtree(other)


EVERY = 500
"""Steps between two checkpoints."""


def train(row: Record, keep: Path | None = None) -> Record:
    """The validation loss of the averaged model, in nats per byte, and the bytes that a worker has sent."""
    saved = Checkpoints(keep and keep / f"{row['group']}, {row['name']}, seed {row['seed']}", row)
    last = saved.last()
    if last is None and row.get("shared"):
        last = _dense_start(row, keep)
    ranks = loopback(lambda rank: _steps(row, rank, last, row["steps"], saved), row["workers"])
    saved.forget()
    return ranks[0] | {"bytes": statistics.mean(rank["bytes"] for rank in ranks)}


def _dense_start(row: Record, keep: Path | None) -> tuple[int, Path]:
    """The states after the steps of an exact all-reduce that runs of this seed and inner optimizer begin with."""
    if keep is None:
        raise SystemExit("outer: runs that share their dense start need --keep, where it lies")
    inner = row.get("inner", "AdamW")
    exact = row | {"name": f"dense start, {inner}", "method": "AllReduce()"}
    saved = Checkpoints(keep / f"{row['group']}, {row['dense']} dense steps of {inner}, seed {row['seed']}", exact)
    last = saved.last()
    if last is None or last[0] < row["dense"]:
        loopback(lambda rank: _steps(exact, rank, last, row["dense"], saved), row["workers"])
        last = saved.last()
    assert last is not None
    return last


def _steps(row: Record, rank: int, last: tuple[int, Path] | None, until: int, saved: Checkpoints) -> Record:
    """One worker's steps up to ``until``, from ``last`` on: a checkpoint of this run, or of its dense start."""
    gpt, begun = example(row), time.process_time()
    torch.manual_seed(row["seed"])
    model = gpt.build_model()
    optimizers = optimizers_of(row, gpt, model)
    begin, state = last[0] if last else 0, torch.load(last[1] / f"{rank}.pt", weights_only=False) if last else {}
    for optimizer, own in zip(optimizers, state.get("optimizers", ()), strict=bool(state)):
        optimizer.load_state_dict(own)
    schedules = schedules_of(row, optimizers, begin)
    if state:
        model.load_state_dict(state["model"])
    replica = gossamer.replicate(model, optimizers, algorithm_of(parse_method(row["method"])))
    if state and state["method"] == row["method"]:
        model.load_state_dict(state["model"])  # anew: replicate() copies rank 0's weights to all workers
        replica.load_state_dict(state["replica"])
        state["bytes"] -= replica.metrics()["bytes_sent"]  # that copy, which was counted before the cut
    before, used = state.get("bytes", 0.0), state.get("seconds", 0.0)

    def save(step: int) -> None:
        states = [optimizer.state_dict() for optimizer in optimizers]
        kept = {"model": model.state_dict(), "optimizers": states, "replica": replica.state_dict(), "method": row["method"]}
        sent, seconds = before + replica.metrics()["bytes_sent"], used + time.process_time() - begun
        saved.save(step, rank, kept | {"bytes": sent, "seconds": seconds})

    batches = gpt.training_batches(rank, row["workers"], row["seed"])
    for step, (inputs, targets) in enumerate(islice(batches, begin, until), begin):
        if saved.kept and step % EVERY == 0 and step > begin:
            save(step)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=row.get("autocast") == "bfloat16", cache_enabled=False):
            error = gpt.loss(model(inputs), targets)
        error.backward()
        for optimizer in optimizers:
            optimizer.step()
        for schedule in schedules:
            schedule.step()
    if until < row["steps"]:
        save(until)
    metrics = replica.metrics()
    with replica.consensus():
        found = gpt.quality(model.eval()) if rank == 0 else {}
    replica.close()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    seconds = used + time.process_time() - begun
    return {**found, "bytes": before + metrics["bytes_sent"], "parameters": parameters, TOOK: seconds}


def runs() -> Iterator[Record]:
    """All runs: of each group, every method with the first seed, then with the next one."""
    for group in tomllib.loads(RUNS.read_text())["groups"]:
        same = {name: value for name, value in group.items() if name not in ("methods", "seeds", "muon", "whole", "shared")}
        for seed in range(group["seeds"]):
            for name, method in group["methods"].items():
                inner = {"inner": "Muon"} if name in group.get("muon", ()) else {}
                shared = {"shared": True} if group.get("shared") and name not in group.get("whole", ()) else {}
                yield {"name": name, "method": method, "seed": seed, **same, **inner, **shared}


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Train what is not there yet, of the group that is asked for."""
    torch.set_num_threads(1)
    torch.backends.cuda.enable_flash_sdp(False)  # on a processor slower than plain products for windows so short
    for run in runs():
        known = store.find(**{name: run[name] for name in KEY})
        if known is None and options.group in (None, run["group"]) and options.only in run["name"]:
            found = train(run, options.keep)
            console.log(f"{run['name']}, seed {run['seed']}: {found}")
            yield run | found | {"gossamer": gossamer.__version__, "torch": torch.__version__}


def groups(rows: Sequence[Record]) -> dict[str, list[Record]]:
    """The rows of each size."""
    found: dict[str, list[Record]] = {}
    for row in rows:
        found.setdefault(row["group"], []).append(row)
    return found


def compared(rows: Sequence[Record]) -> list[Record]:
    """Of every method and size, over its seeds: the mean loss, its paired difference to an all-reduce, and its share of that's
    bytes."""
    return [one for group, own in groups(rows).items() for one in _compared(group, own)]


def _compared(group: str, rows: Sequence[Record]) -> Iterator[Record]:
    exact = {row["seed"]: row for row in rows if row["name"] == FIRST}
    for name, method in dict.fromkeys((row["name"], row["method"]) for row in rows):
        own = [row for row in rows if row["method"] == method and row["name"] == name]
        pairs = [(row, exact[row["seed"]]) for row in own if row["seed"] in exact]
        yield {
            "group": group, "name": name, "method": method, "seeds": len(own),
            "loss": statistics.mean(row["loss"] for row in own),
            "difference": interval([row["loss"] - other["loss"] for row, other in pairs]) if pairs else "",
            "fewer": statistics.mean(other["bytes"] / row["bytes"] for row, other in pairs) if pairs else None,
            "later": statistics.mean(_after_start(other, row, other) / _after_start(row, row, other) for row, other in pairs)
            if pairs else None,
            "seconds": statistics.mean(seconds) if (seconds := [row[TOOK] for row in own if TOOK in row]) else None,
        }  # fmt: skip


def _dense(row: Record) -> int:
    """The dense steps that a run begins with."""
    return int(row["dense"]) if row.get("shared") or f"after({row['dense']}, " in row["method"] else 0


def _after_start(sender: Record, row: Record, exact: Record) -> float:
    """The bytes of a run without those of the dense start that ``row`` begins with, which are those of an all-reduce."""
    return float(sender["bytes"] - exact["bytes"] * _dense(row) / row["steps"])


COLUMNS = (
    Column("size", text("group")),
    Column("", text("name")),
    Column("method", code("method")),
    Column("seeds", text("seeds")),
    Column("loss, nats per byte", number("loss", "{:.3f}")),
    Column("difference to all-reduce (95 % interval)", text("difference")),
    Column("times fewer bytes", number("fewer", "{:.1f}")),
    Column("after the dense start", number("later", "{:.1f}")),
    Column("seconds of a processor per run", number("seconds", "{:.0f}")),
)


def size(row: Record) -> str:
    """The size of a run, in words."""
    return f"{row['workers']} workers, {row['steps']:,} steps, {row['parameters']:,} parameters"


def note(rows: Sequence[Record]) -> str:
    """The sizes of the runs, and the machine."""
    sizes = [
        f"{group}: {size(row)}, windows of 64 bytes, batches of {row['batch']} per worker, {row['dense']} dense steps, "
        f"{'float32' if 'autocast' not in row else row['autocast'] + ' (autocast)'}, rate {row.get('rate', 1e-3):g}, "
        f"{row.get('schedule', 'constant')}."
        for group, (row, *_) in groups(rows).items()
    ]
    return " ".join([*sizes, measured_on(rows)])


DRAWN = ("small", "large")
"""The groups with every method; the others vary one thing of a few methods, and are in the table alone."""


def draw(rows: Sequence[Record], path: Path) -> None:
    """The loss of every method over what a worker sends per step once the dense start is over, with the spread of its seeds."""
    shown: dict[str, dict[str, list[tuple[float, float]]]] = {}
    for group, own in groups([row for row in rows if row["group"] in DRAWN]).items():
        exact = next(row for row in own if row["name"] == FIRST)
        methods = shown.setdefault(f"{group}: {size(own[0])}", {})
        for row in own:
            sent = _after_start(row, row, exact) / (row["steps"] - _dense(row))
            methods.setdefault(row["name"], []).append((sent / 1e3, row["loss"]))
    loss_over_bytes(path, shown, title="Loss over bytes, after the dense start", below="KB sent per worker and step")


STUDY = Study("outer", KEY, lambda rows: COLUMNS, compared, note=note)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there yet, write the table, and draw it where a picture is asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--group", help="train the runs of this group alone")
    parser.add_argument("--only", default="", help="train only runs whose names have this in them")
    parser.add_argument("--keep", type=Path, help="folder for checkpoints, from which a run that was cut goes on")
    parser.add_argument("--picture", type=Path, help="where the loss over bytes is drawn")
    STUDY.main(parser, measure, arguments)
    options = parser.parse_args(arguments)
    if options.picture and (rows := STUDY.store(options.save_to).rows):
        draw(rows, options.picture)


if __name__ == "__main__":
    main()
