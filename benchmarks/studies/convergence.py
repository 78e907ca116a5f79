"""Convergence: what training ends with under each relaxation, many workers in one process, paired by seed.

python -m benchmarks.studies.convergence --workload examples/02_convnet.py --steps 351 --save-to benchmarks/results

Every run is written down when it ends, and not done again unless the workload's file has changed: stop and go on as you like.
"""

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

import gossamer
from gossamer.bench.catalogue import digest, find_workload
from gossamer.bench.methods import OPTIMIZERS, in_place_of, join, optimizer_of, parse_method, parse_optimizer
from gossamer.bench.rows import append_row, markdown, read_rows
from gossamer.bench.workload import Batches, Workload
from gossamer.comm.loopback import loopback
from gossamer.errors import ConfigurationError

GRADIENTS = (
    "AllReduce()",
    "ScatterReduce()",
    "ScatterReduce(codec=Quantize(bits=4))",
    "ScatterReduce(codec=Sign())",
    "ByteGrad()",
    "QSGD()",
    "ChunkSparse()",
    "PowerSGD()",
)
WEIGHTS = (
    "AllReduce()",
    "Gossip()",
    "GossipGraD()",
    "QuantizedGossip(bits=8)",
    "QuantizedGossip()",
    "DecentralizedSGD()",
    "LowPrecisionDecentralized()",
    "LowPrecisionDecentralized(codec=Quantize(bits=4))",
    "GossipPGA()",
    "PushSum()",
    "PushSum(topology=RandomPush())",
)
MOMENTA = (
    "OneBitAdam(lr=0.001, warmup=1000000)",
    "OneBitAdam(lr=0.001, warmup=100)",
    "QAdam(lr=0.001, warmup=100)",
)
METHODS = {"gradients": GRADIENTS, "weights": WEIGHTS, "momenta": MOMENTA}
"""What is trained beside an exact all-reduce: relaxations that move gradients, weights, or Adam's momentum.

Beside Adam's momentum it is Adam with an exact all-reduce: the warm-up of 1-bit Adam, as long as the whole run. The others
are told when to end it: in runs of a few hundred steps the variance itself is never, or hardly, found to be stable.
"""

QUALITIES = {"accuracy": (100.0, "points of accuracy"), "loss": (1.0, "nats of validation loss")}

console = Console(stderr=True)


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


Train = Callable[[Workload, Training], dict[str, float]]
"""The quality that a run ends with."""


def train(workload: Workload, run: Training, batches: Batches | None = None) -> dict[str, float]:
    """The quality of the averaged model after the steps of all workers in loopback, on the workload's own batches; and how far
    the workers' models are from it (``distance``: see :meth:`gossamer.Replica.consensus_distance`)."""
    check(run)
    batches, quality = (replace(workload, training_batches=batches) if batches else workload).training()

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
    workload: Workload, runs: Iterable[Training], log: Path, train: Train = train, of_file: str | None = None
) -> list[dict[str, Any]]:
    """All of ``runs``; those that ``log`` has are taken from there. Returns all that it has then.

    ``of_file``: the :func:`~gossamer.bench.catalogue.digest` of the workload's file. What another version of it ended with is
    not taken.
    """
    rows = read_rows(log)
    own = [row for row, version in zip(rows, versions(rows), strict=True) if version in (None, of_file)]
    there = [Training(**{each.name: row[each.name] for each in fields(Training) if each.name in row}) for row in own]
    for run in runs:
        if run in there:
            continue
        begin = time.perf_counter()
        row = run.key() | {"quality": train(workload, run), "seconds": time.perf_counter() - begin}
        console.log(f"{run.key()}: {row['quality']} ({row['seconds']:.0f} s)")
        rows.append(row | {"digest": of_file, "gossamer": gossamer.__version__, "torch": torch.__version__})
        append_row(log, rows[-1])
    return rows


def versions(rows: Sequence[dict[str, Any]]) -> list[str | None]:
    """Of which version of its workload's file each row is. Old rows do not tell, and count as of the first that is told."""
    first: dict[str, str | None] = {}
    for row in rows:
        if "digest" in row:
            first.setdefault(row["workload"], row["digest"])
    return [row.get("digest", first.get(row["workload"])) for row in rows]


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: mean quality of every method, and its paired difference to the first method with a 95 % interval.

    Optimizers that communicate are compared among themselves, and so is what each version of a workload's file ended with.
    """
    head = (
        "workload", "workers", "batches cut by", "steps", "method", "learning rate", "seeds", "quality",
        "difference to the first (95 % interval)", "replicas apart",
    )  # fmt: skip
    lines: list[list[str]] = []
    groups: dict[tuple[Any, ...], dict[tuple[str, str], dict[int, float]]] = {}
    apart: dict[tuple[Any, ...], list[float]] = {}
    units: dict[str, str] = {}
    for row, workload in zip(rows, _called(rows), strict=True):
        name = "accuracy" if "accuracy" in row["quality"] else "loss"
        scale, units[workload] = QUALITIES[name]
        own_optimizer = row["method"].partition("(")[0] in OPTIMIZERS
        decay = row.get("decay", False)
        about = (workload, row["workers"], row.get("cut", 1), row["steps"], own_optimizer, decay)
        group = groups.setdefault(about, {})
        method = f"`{row['method']}`" + (f", `{row['optimizer']}`" if "optimizer" in row else "")
        spelled = method, f"{row.get('lr') or 'its own'}{', falling to zero' if decay else ''}"
        group.setdefault(spelled, {})[row["seed"]] = scale * row["quality"][name]
        if row["quality"].get("distance"):
            apart.setdefault((about, spelled), []).append(row["quality"]["distance"])
    for about, methods in groups.items():
        reference = next(iter(methods.values()))
        for spelled, values in methods.items():
            shown = f"{statistics.mean(values.values()):.3f} {units[about[0]]}"
            pairs = [values[seed] - reference[seed] for seed in values if seed in reference]
            distances = apart.get((about, spelled))
            distance = f"{100 * statistics.mean(distances):.2f} %" if distances else ""
            lines.append([*map(str, about[:4]), *spelled, str(len(values)), shown, interval(pairs), distance])
    return markdown(head, lines)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a Python file, or an emulated model such as 'ResNet50(2.0)'")
    parser.add_argument("--family", choices=tuple(METHODS), default="gradients")
    parser.add_argument("--methods", nargs="+", help="instead of the whole family")
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--cut", type=int, default=1, help="cut every batch into so many (more workers, the same global batch)")
    parser.add_argument("--lr", type=float, help="learning rate, instead of the workload's")
    parser.add_argument("--decay", action="store_true", help="let the learning rate fall linearly to zero")
    parser.add_argument("--optimizer", help="one of gossamer.optim, such as 'GossipAdamW()', instead of the workload's")
    parser.add_argument("--save-to", type=Path, default=Path("out/convergence"))
    return parser


def asked_for(options: argparse.Namespace) -> tuple[Workload, list[Training]]:
    """The workload and the runs that a command line of :func:`make_parser` asks for. Raises as :func:`check` does."""
    workload = find_workload(options.workload)
    runs = [
        Training(
            workload.name,
            method,
            options.workers,
            options.steps,
            seed,
            options.cut,
            options.lr,
            options.optimizer,
            options.decay,
        )
        for seed in range(options.seeds)
        for method in options.methods or METHODS[options.family]
    ]
    for run in runs:  # before the first is trained
        check(run)
    return workload, runs


def main() -> None:
    """Train what is not there yet, and write the table."""
    options = make_parser().parse_args()
    try:
        _train_and_write(options)
    except ConfigurationError as error:
        raise SystemExit(f"convergence: {error}") from None


def _train_and_write(options: argparse.Namespace) -> None:
    log = options.save_to / "convergence.jsonl"
    workload, runs = asked_for(options)
    rows = run_all(workload, runs, log, of_file=digest(options.workload))
    (options.save_to / "convergence.md").write_text("\n".join(table(rows)) + "\n")
    console.log(f"wrote {options.save_to / 'convergence.md'}")


if __name__ == "__main__":
    main()
