"""Neighbours: the loss that averaging weights costs, beside what the effective number of neighbours says of it.

A worker is said to train as if so many workers were averaged exactly in every step: what a method costs is read from runs of an
exact all-reduce with fewer workers, between which the loss is a straight line over the logarithm of their number. The decay of
the model (:mod:`gossamer.planning.mixing`) is fitted on one method (``FITTED``); the others are judged. All runs have the same
batch per worker, steps, learning rate and optimizer, and are made in one process (loopback), on one thread, with the GPT of
``examples/01_gpt.py``, narrower. Every run is written down when it ends, and is not done again.
"""

import argparse
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache

import numpy as np
import torch

import gossamer
from benchmarks.studies.convergence import interval
from benchmarks.studies.harness import Study, console, measured_on, parser_of
from benchmarks.studies.outer import train
from gossamer.bench.rows import Column, Record, Store, code, number, text
from gossamer.planning.mixing import DECAY, neighbours
from gossamer.spelled import algorithm_of

EXACT = "AllReduce()"
WORKERS = (1, 2, 4, 8, 16, 32)
"""Of the exact runs, from which losses are read."""

CASES = (
    (8, "Gossip()"), (16, "Gossip()"), (32, "Gossip()"), (8, "in_parts(2, Gossip())"), (8, "in_parts(4, Gossip())"),
    (8, "LocalSGD(every=2, dense=0)"), (8, "LocalSGD(every=8, dense=0)"), (8, "LocalSGD(every=16, dense=0)"),
    (16, "Hierarchical(Gossip(), ranks_per_node=4)"),
)  # fmt: skip
"""Workers and method."""

FITTED = 16, "Gossip()"
"""The case on which the decay is fitted; it is not judged."""

SIZE = {"steps": 250, "layers": 1, "width": 64, "batch": 4, "lr": 2e-3}


def runs(seeds: Iterable[int]) -> Iterator[Record]:
    """All runs, seed after seed."""
    for seed in seeds:
        for workers, method in (*((each, EXACT) for each in WORKERS), *CASES):
            yield {"method": method, "workers": workers, "seed": seed, **SIZE}


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Train what is not there yet."""
    torch.set_num_threads(1)
    for run in runs(options.seeds):
        if store.find(**{name: run[name] for name in STUDY.key}) is None:
            used = time.process_time()
            method = f"with_optimizer({run['method']}, GossipAdamW(lr={run['lr']}))"
            found = train(run | {"name": run["method"], "method": method})
            took = {"processor_seconds": time.process_time() - used}
            console.log(f"{run['method']}, {run['workers']} workers, seed {run['seed']}: {found['loss']:.4f}, {took}")
            yield run | found | took | {"gossamer": gossamer.__version__, "torch": torch.__version__}


@cache
def effective(method: str, workers: int, decay: float) -> float:
    """The effective number of neighbours."""
    return neighbours(algorithm_of(method), workers, decay=decay)


def loss_of(exact: Mapping[int, float], count: float) -> float:
    """The loss of so many exact workers."""
    known = sorted(exact)
    return float(np.interp(np.log2(count), np.log2(known), [exact[each] for each in known]))


def predicted(exact: Mapping[int, float], case: tuple[int, str], decay: float) -> float:
    """By how much the loss of a case is above that of as many exact workers."""
    workers, method = case
    return loss_of(exact, effective(method, workers, decay)) - exact[workers]


def judged(rows: Sequence[Record]) -> list[Record]:
    """Every case of which there are runs, over its seeds: the extra loss, measured and predicted with the fitted decay, and
    with the one that plans use."""
    losses = {(row["workers"], row["method"], row["seed"]): row["loss"] for row in rows}
    seeds = sorted({row["seed"] for row in rows if all((each, EXACT, row["seed"]) in losses for each in WORKERS)})
    if not seeds:
        return []
    exact = {each: statistics.mean(losses[each, EXACT, seed] for seed in seeds) for each in WORKERS}
    extra = {
        case: [losses[*case, seed] - losses[case[0], EXACT, seed] for seed in seeds if (*case, seed) in losses]
        for case in CASES
    }
    extra = {case: found for case, found in extra.items() if found}
    decay = fitted(exact, statistics.mean(extra[FITTED])) if FITTED in extra else DECAY
    return [
        {
            "workers": case[0], "method": case[1], "seeds": len(found), "extra": statistics.mean(found),
            "interval": interval(found), "fits": "fitted" if case == FITTED else "", "decay": decay,
            "count": effective(case[1], case[0], decay), "predicted": predicted(exact, case, decay),
            "usual": predicted(exact, case, DECAY),
        }
        for case, found in extra.items()
    ]  # fmt: skip


def fitted(exact: Mapping[int, float], extra: float) -> float:
    """The decay, between 0.5 and 0.99, with which the case that is fitted costs what it was measured to cost."""
    low, high = 0.01, 0.5
    for _ in range(9):
        lost = (low * high) ** 0.5
        low, high = (low, lost) if predicted(exact, FITTED, 1 - lost) > extra else (lost, high)
    return float(1 - (low * high) ** 0.5)


def distances(rows: Sequence[Record], name: str) -> tuple[float, float]:
    """Of the cases that are judged: the root mean square of the error in nats, and the rank correlation."""
    from scipy.stats import spearmanr

    own = [row for row in rows if not row["fits"]]
    errors = [row[name] - row["extra"] for row in own]
    rank = spearmanr([row[name] for row in own], [row["extra"] for row in own]).statistic
    return (statistics.fmean(error**2 for error in errors)) ** 0.5, float(rank)


def note(rows: Sequence[Record]) -> str:
    """The distances, the exact runs, and their size."""
    found = judged(rows)
    if len(found) < 4:
        return measured_on(rows)
    told = [
        f"{what}: error {error:.3f} nats (root mean square of {sum(not row['fits'] for row in found)} cases), rank correlation "
        f"{rank:.2f}."
        for what, (error, rank) in (
            (f"Decay {found[0]['decay']:.3f}, fitted on one case", distances(found, "predicted")),
            (f"Decay {DECAY}, which plans use", distances(found, "usual")),
        )
    ]
    means = [
        f"{each} {statistics.mean(row['loss'] for row in rows if (row['workers'], row['method']) == (each, EXACT)):.3f}"
        for each in WORKERS
    ]
    row = rows[0]
    size = f"{row['steps']} steps, {row['parameters']:,} parameters, {row['batch']} windows of 64 bytes per worker, "
    told.append(f"Loss of exact runs by workers: {', '.join(means)}. {size}`GossipAdamW(lr={row['lr']})`. {measured_on(rows)}")
    return "\n\n".join(told)


COLUMNS = (
    Column("workers", text("workers")),
    Column("method", code("method")),
    Column("seeds", text("seeds")),
    Column("extra loss, nats (95 % interval)", text("interval")),
    Column("effective neighbours", number("count", "{:.1f}")),
    Column("predicted, decay fitted", number("predicted", "{:+.3f}")),
    Column("predicted, usual decay", number("usual", "{:+.3f}")),
    Column("", text("fits")),
)

STUDY = Study("neighbours", ("method", "workers", "seed", *SIZE), lambda rows: COLUMNS, judged, note)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there yet, and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    STUDY.main(parser, measure, arguments)


if __name__ == "__main__":
    main()
