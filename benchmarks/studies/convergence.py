"""Convergence: what training ends with under each relaxation, many workers in one process, paired by seed.

Without ``--workload`` all runs of ``convergence.toml`` are trained. Every run is written down when it ends, and not done again
unless the workload's file has changed: stop and go on as you like.
"""

import argparse
import statistics
import time
import tomllib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gossamer
from benchmarks.studies.harness import Study, console, parser_of
from benchmarks.studies.training import parse_optimizer, training_of
from gossamer.bench.catalogue import digest, find_workload
from gossamer.bench.methods import OPTIMIZERS, in_place_of, join, optimizer_of, parse_method
from gossamer.bench.rows import Column, Record, Store, code, text
from gossamer.bench.workload import Batches, Workload
from gossamer.comm.loopback import loopback
from gossamer.errors import ConfigurationError

RUNS = Path(__file__).with_suffix(".toml")
"""What is trained: families of methods, and runs."""

METHODS: dict[str, list[str]] = tomllib.loads(RUNS.read_text())["families"]
"""What is trained beside an exact all-reduce: relaxations that move gradients, weights, or Adam's momentum.

Beside Adam's momentum it is Adam with an exact all-reduce: the warm-up of 1-bit Adam, as long as the whole run. The others
are told when to end it: in runs of a few hundred steps the variance itself is never, or hardly, found to be stable.
"""

QUALITIES = {"accuracy": (100.0, "points of accuracy"), "loss": (1.0, "nats of validation loss")}


@dataclass(frozen=True, slots=True)
class Training:
    """One run: which method, how many workers, steps and which seed.

    ``cut``: each batch of the workload is cut into that many, so that more workers share the same global batch.
    ``lr``: the learning rate, and ``optimizer``: one of gossamer's, spelled as in a script, instead of the workload's own.
    ``decay``: the learning rate falls linearly to zero.
    """

    workload: str
    method: str
    workers: int
    steps: int
    seed: int
    cut: int = 1
    lr: float | None = None
    optimizer: str | None = None
    decay: bool = False

    def key(self) -> dict[str, Any]:
        """What a row of results is known by: what differs from the defaults, at least the first five."""
        return {each.name: getattr(self, each.name) for each in fields(self) if getattr(self, each.name) != each.default}


def check(run: Training) -> None:
    """Raises ConfigurationError for a method or an optimizer that nobody knows, and where both name an optimizer."""
    method = parse_method(run.method)
    if isinstance(method, str):
        raise ConfigurationError(f"{run.method} is no algorithm of gossamer: all workers are trained in one process")
    named_by_method = optimizer_of(method)
    if run.optimizer is not None:
        parse_optimizer(run.optimizer)
        if named_by_method is not None:
            raise ConfigurationError(f"{run.method} names an optimizer, and so does --optimizer {run.optimizer}: one of them")


KEY = (*(each.name for each in fields(Training)), "digest")

Train = Callable[[Workload, Training], dict[str, float]]
"""The quality that a run ends with."""


def train(workload: Workload, run: Training, batches: Batches | None = None) -> dict[str, float]:
    """The quality of the averaged model after the steps of all workers in loopback, on the workload's own batches; and how far
    the workers' models are from it (``distance``: see :meth:`gossamer.Replica.consensus_distance`)."""
    check(run)
    batches, quality = training_of(replace(workload, training_batches=batches) if batches else workload)

    def body(rank: int) -> dict[str, float]:
        torch.manual_seed(run.seed)
        model: nn.Module = workload.build_model()
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # convolutions take a fifth less time
        optimizer = workload.build_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = run.lr or group["lr"]
        if run.optimizer is not None:
            optimizer = in_place_of(optimizer, parse_optimizer(run.optimizer), model)
        joined = join(parse_method(run.method), model, optimizer)
        assert isinstance(joined.optimizer, Optimizer)
        rate = LambdaLR(joined.optimizer, lambda step: 1 - step / run.steps if run.decay else 1.0)
        source = batches(rank, run.workers, run.seed)
        for inputs, targets in islice(cut(source, run.cut), run.steps):
            joined.step(inputs, targets, workload.loss)
            rate.step()
        if isinstance(source, Generator):  # all ranks together, and not when its memory is freed
            source.close()
        assert joined.replica is not None
        distance = joined.replica.consensus_distance()
        with joined.replica.consensus():
            result = quality(model) | {"distance": distance} if rank == 0 else {}
        joined.replica.close()
        return result

    return loopback(body, run.workers)[0]


def cut(batches: Iterator[tuple[Tensor, Tensor]], pieces: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Each batch in ``pieces`` smaller ones."""
    for inputs, targets in batches:
        yield from zip(inputs.tensor_split(pieces), targets.tensor_split(pieces), strict=True)


def run_all(
    workload: Workload, runs: Iterable[Training], store: Store, train: Train = train, of_file: str | None = None
) -> Iterator[Record]:
    """Rows of those of ``runs`` that ``store`` does not have, each when it is there.

    ``of_file``: the :func:`~gossamer.bench.catalogue.digest` of the workload's file. What another version of it ended with is
    not taken.
    """
    own = [row for row, version in zip(store.rows, versions(store.rows), strict=True) if version in (None, of_file)]
    there = [Training(**{each.name: row[each.name] for each in fields(Training) if each.name in row}) for row in own]
    for run in dict.fromkeys(runs):
        if run in there:
            continue
        begin = time.perf_counter()
        row = run.key() | {"quality": train(workload, run), "seconds": time.perf_counter() - begin}
        console.log(f"{run.key()}: {row['quality']} ({row['seconds']:.0f} s)")
        yield row | {"digest": of_file, "gossamer": gossamer.__version__, "torch": torch.__version__}


def versions(rows: Sequence[dict[str, Any]]) -> list[str | None]:
    """Of which version of its workload's file each row is. Old rows do not tell, and count as of the first that is told."""
    first: dict[str, str | None] = {}
    for row in rows:
        if "digest" in row:
            first.setdefault(row["workload"], row["digest"])
    return [row.get("digest", first.get(row["workload"])) for row in rows]


def compared(rows: Sequence[Record]) -> list[Record]:
    """Of every method, over its seeds: mean quality, and its paired difference to the first method with a 95 % interval.

    Optimizers that communicate are compared among themselves, and so is what each version of a workload's file ended with.
    """
    groups: dict[tuple[Any, ...], dict[tuple[str, str], list[Record]]] = {}
    for row, workload in zip(rows, _called(rows), strict=True):
        own_optimizer, decay = row["method"].partition("(")[0] in OPTIMIZERS, row.get("decay", False)
        about = (workload, row["workers"], row.get("cut", 1), row["steps"], own_optimizer, decay)
        method = row["method"] + (f"`, `{row['optimizer']}" if "optimizer" in row else "")
        rate = f"{row.get('lr') or 'its own'}{', falling to zero' if decay else ''}"
        groups.setdefault(about, {}).setdefault((method, rate), []).append(row)
    return [
        dict(zip(("workload", "workers", "cut", "steps"), about, strict=False)) | {"method": method, "rate": rate}
        | _over_seeds(own, next(iter(methods.values())))
        for about, methods in groups.items() for (method, rate), own in methods.items()
    ]  # fmt: skip


def _over_seeds(rows: Sequence[Record], reference: Sequence[Record]) -> Record:
    """What the runs of one method ended with, beside those of the first with the same seeds."""
    name = "accuracy" if "accuracy" in rows[0]["quality"] else "loss"
    scale, unit = QUALITIES[name]
    own, other = ({row["seed"]: scale * row["quality"][name] for row in each} for each in (rows, reference))
    distances = [row["quality"]["distance"] for row in rows if row["quality"].get("distance")]
    return {
        "seeds": len(own),
        "quality": f"{statistics.mean(own.values()):.3f} {unit}",
        "difference": interval([own[seed] - other[seed] for seed in own if seed in other]),
        "apart": f"{100 * statistics.mean(distances):.2f} %" if distances else "",
    }


COLUMNS = (
    Column("workload", text("workload")),
    Column("workers", text("workers")),
    Column("batches cut by", text("cut")),
    Column("steps", text("steps")),
    Column("method", code("method")),
    Column("learning rate", text("rate")),
    Column("seeds", text("seeds")),
    Column("quality", text("quality")),
    Column("difference to the first (95 % interval)", text("difference")),
    Column("replicas apart", text("apart")),
)

STUDY = Study("convergence", KEY, lambda rows: COLUMNS, compared, note=lambda rows: "")


def _called(rows: Sequence[dict[str, Any]]) -> list[str]:
    """What the table calls the workload of each row: with the version of its file, where there are several."""
    named = [(row["workload"], version) for row, version in zip(rows, versions(rows), strict=True)]
    several = Counter(name for name, _ in set(named))
    return [f"{name} ({version})" if several[name] > 1 else name for name, version in named]


def interval(differences: Sequence[float]) -> str:
    """The mean difference with its 95 % interval (Student's t)."""
    mean = statistics.mean(differences)
    if len(differences) < 2 or not any(differences):
        return f"{mean:+.3f}"
    from scipy.stats import t

    half = float(t.ppf(0.975, len(differences) - 1)) * statistics.stdev(differences) / len(differences) ** 0.5
    return f"{mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})"


def make_parser() -> argparse.ArgumentParser:
    """What can be asked for."""
    parser = parser_of(__doc__)
    parser.add_argument("--workload", help="a Python file, or an emulated model such as 'ResNet50(2.0)'")
    parser.add_argument("--family", choices=tuple(METHODS), default="gradients")
    parser.add_argument("--methods", nargs="+", help="instead of the whole family")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cut", type=int, default=1, help="cut every batch into so many (more workers, the same global batch)")
    parser.add_argument("--lr", type=float, help="learning rate, instead of the workload's")
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall linearly to zero")
    parser.add_argument("--optimizer", help="one of gossamer.optim, such as 'GossipAdamW()', instead of the workload's")
    return parser


def asked_for(options: argparse.Namespace) -> tuple[Workload, list[Training]]:
    """The workload and the runs that a command line of :func:`make_parser` asks for. Raises as :func:`check` does."""
    if options.steps is None:
        raise ConfigurationError("--workload needs --steps")
    workload, names = find_workload(options.workload), [each.name for each in fields(Training)]
    same = {name: value for name, value in vars(options).items() if name in names} | {"workload": workload.name}
    methods = options.methods or METHODS[options.family]
    runs = [Training(**same, method=method, seed=seed) for seed in range(options.seeds) for method in methods]
    for run in runs:  # before the first is trained
        check(run)
    return workload, runs


def listed(path: Path = RUNS) -> list[argparse.Namespace]:
    """The options of every run of a file."""
    usual = vars(make_parser().parse_args([]))
    return [argparse.Namespace(**usual | told) for told in tomllib.loads(path.read_text())["runs"]]


def train_all(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Train what is not there yet: what the options ask for, or without a workload all that is listed."""
    asked = [(each, *asked_for(each)) for each in ([options] if options.workload else listed())]
    for each, workload, runs in asked:
        yield from run_all(workload, runs, store, of_file=digest(each.workload))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there yet, and write the table."""
    STUDY.main(make_parser(), train_all, arguments)


if __name__ == "__main__":
    main()
