"""Paired timing: several ways to communicate take turns at the same training steps, in one run on the same machine.

A script of the lab (or of torchrun on a real cluster); rank 0 prints one JSON object:

    gossamer lab --hosts 4 --rate 200mbit -- -m gossamer.bench.paired --workload examples/02_convnet.py

Every side trains its own copy of the model. A round is a few steps of each side, barrier to barrier, the order of the
sides alternating from round to round; what counts is the ratio of two sides within a round.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gossamer.bench.sides import join, parse_side
from gossamer.bench.workload import Workload, load_workload

Step = Callable[[], None]


def make_side(workload: Workload, side: str, rank: int) -> Step:
    """One training step of a fresh model that communicates as ``side`` says."""
    torch.manual_seed(0)
    model, generator = workload.build_model(), torch.Generator().manual_seed(rank)
    trained, optimizer, _ = join(parse_side(side), model, workload.build_optimizer(model))

    def step() -> None:
        inputs, targets = workload.random_batch(generator)
        optimizer.zero_grad()
        workload.loss(trained(inputs), targets).backward()
        optimizer.step()

    return step


def take_turns(sides: dict[str, Step], rounds: int, steps: int, warmup: int) -> dict[str, list[float]]:
    """Seconds per step of every side in every round."""
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for step in sides.values():
        for _ in range(warmup):
            step()
    names = list(sides)
    for index in range(rounds):
        turn = index // 2 % len(names)
        order = names[turn:] + names[:turn]
        for name in order if index % 2 == 0 else reversed(order):
            seconds[name].append(_time(sides[name], steps))
    return seconds


def _time(step: Step, steps: int) -> float:
    step()  # what the side before left in caches and token buckets is not this side's
    dist.barrier()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    dist.barrier()
    return (time.perf_counter() - begin) / steps


def compare(seconds: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Median of the paired ratios with its 95 % bootstrap interval, and the median step times."""
    import numpy as np
    from scipy.stats import bootstrap

    ratios = np.array(seconds) / np.array(reference)
    low = high = float(np.median(ratios))
    if len(ratios) > 1 and np.ptp(ratios) > 0:
        interval = bootstrap((ratios,), np.median, method="percentile", rng=np.random.default_rng(0)).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return {
        "step_seconds": statistics.median(seconds),
        "ratio": float(np.median(ratios)),
        "ratio_low": low,
        "ratio_high": high,
    }


def run(workload: Workload, sides: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Time all ``sides``; the first one is the reference of the ratios."""
    rank = dist.get_rank()
    made = {name: make_side(workload, name, rank) for name in sides}
    seconds = take_turns(made, rounds, steps, warmup=4)
    reference = seconds[sides[0]]
    return {
        "workload": workload.name,
        "world": dist.get_world_size(),
        "rate": os.environ.get("GOSSAMER_LAB_RATE", "unshaped"),
        "rounds": rounds,
        "steps_per_round": steps,
        "sides": {name: compare(values, reference) for name, values in seconds.items()},
        "seconds": seconds,
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


def main() -> None:
    """Take the turns and print from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", type=Path, required=True)
    parser.add_argument("--sides", nargs="+", default=["ddp", "ddp-again", "AllReduce()", "Gossip(wire='bf16')"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    result = run(load_workload(options.workload), options.sides, options.rounds, options.steps)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
