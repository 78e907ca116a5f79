"""Shuffle: gossip on shards sorted by label, without and with samples that travel, beside globally shuffled data.

Every run is written down when it ends, and not done again unless the workload's file has changed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.studies.convergence import COLUMNS, KEY, Training, compared, run_all, train
from benchmarks.studies.harness import Study, parser_of
from benchmarks.studies.training import training_of
from gossamer.bench.catalogue import digest, find_workload
from gossamer.bench.rows import Record, Store
from gossamer.bench.workload import Workload
from gossamer.data import RingShuffle
from gossamer.errors import ConfigurationError

SHUFFLED = "shuffled globally"
SORTED = "sorted by label"
TRAVELLING = "sorted by label, RingShuffle"
MIXED = "sorted by label, RingShuffle, mix=True"
DEALT = "sorted by label, RingShuffle, deal=True"
ALGORITHM, BATCH = "Gossip()", 64
"""What rows that name neither were trained with."""

ARMS = (SHUFFLED, SORTED, TRAVELLING, MIXED, DEALT)

Shard = tuple[Tensor, Tensor]


def shard(inputs: Tensor, labels: Tensor, rank: int, world: int) -> Shard:
    """One worker's share of samples sorted by label: of ten labels, eight workers have one or two each."""
    chosen = torch.argsort(labels, stable=True).tensor_split(world)[rank]
    return inputs[chosen], labels[chosen]


def staying(own: Shard, batch: int, rank: int, seed: int) -> Iterator[Shard]:
    """Batches of a share that stays where it is, without end, in another order in each local epoch."""
    inputs, labels = own
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    while True:
        for chosen in torch.randperm(len(labels), generator=generator).split(batch):
            if len(chosen) == batch:
                yield inputs[chosen], labels[chosen]


def regrouped(batches: Iterator[Shard], size: int) -> Iterator[Shard]:
    """The same samples in the same order, in batches of ``size``."""
    inputs, labels = next(batches)
    while True:
        while len(labels) < size:
            more, theirs = next(batches)
            inputs, labels = torch.cat((inputs, more)), torch.cat((labels, theirs))
        yield inputs[:size], labels[:size]
        inputs, labels = inputs[size:], labels[size:]


def travelling(own: Shard, batch: int, seed: int, **options: Any) -> Iterator[Shard]:
    """Batches of a share that wanders around the ring, without end."""
    with RingShuffle(own, batch, seed=seed, **options) as shuffle:
        yield from endless(shuffle)


def endless(shuffle: RingShuffle) -> Iterator[Shard]:
    """Local epoch after local epoch."""
    while True:
        yield from shuffle


def train_on(workload: Workload, run: Training, algorithm: str, batch: int) -> dict[str, float]:
    """What gossip ends with on the batches of one arm, which is the method of ``run``."""
    if workload.training_samples is None:
        raise ConfigurationError(f"the workload {workload.name} defines no training_samples()")
    inputs, labels = workload.training_samples()
    globally, _ = training_of(workload)

    def batches(rank: int, world: int, seed: int) -> Iterator[Shard]:
        if run.method == SHUFFLED:
            return regrouped(globally(rank, world, seed), batch)
        own = shard(inputs, labels, rank, world)
        if run.method == SORTED:
            return staying(own, batch, rank, seed)
        return travelling(own, batch, seed, mix=run.method == MIXED, deal=run.method == DEALT)

    return train(workload, replace(run, method=algorithm), batches)


STUDY = Study("shuffle", KEY, lambda rows: COLUMNS, compared, note=lambda rows: "")


def train_all(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Train every arm that is not there yet."""
    other = (options.algorithm, options.batch) != (ALGORITHM, BATCH)
    settings = f" ({options.algorithm}, batches of {options.batch})" if other else ""
    arms = {arm + settings: arm for arm in ARMS}  # by what rows are known by

    def train_arm(workload: Workload, run: Training) -> dict[str, float]:
        return train_on(workload, replace(run, method=arms[run.method]), options.algorithm, options.batch)

    workload = find_workload(options.workload)
    runs = [Training(workload.name, arm, options.workers, options.steps, seed) for seed in range(options.seeds) for arm in arms]
    yield from run_all(workload, runs, store, train_arm, digest(options.workload))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train what is not there yet, and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--workload", default="examples/02_convnet.py", help="a Python file that defines training_samples()")
    parser.add_argument("--algorithm", default=ALGORITHM)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--batch", type=int, default=BATCH, help="samples per worker and step")
    parser.add_argument("--steps", type=int, default=936, help="the default is a whole turn of all samples, 8 local epochs")
    parser.add_argument("--seeds", type=int, default=3)
    STUDY.main(parser, train_all, arguments)


if __name__ == "__main__":
    main()
