"""Paired timing: several ways to communicate take turns at the same training steps, in one run on the same machine.

A script of the lab (or of torchrun on a real cluster); rank 0 prints one JSON object:

    gossamer lab --hosts 4 --rate 200mbit -- -m gossamer.bench.paired --workload examples/02_convnet.py

Every side trains its own copy of the model. A round is a few steps of each side, barrier to barrier, the order of the
sides alternating from round to round; what counts is the ratio of two sides within a round.
"""

import argparse
import json
import operator
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.distributed as dist

from gossamer.algorithms import Algorithm
from gossamer.bench import peers
from gossamer.bench.bound import Ready, joined, measure_ready, overlapped, wire
from gossamer.bench.catalogue import find_workload
from gossamer.bench.counters import Counters
from gossamer.bench.line import plain_tcp
from gossamer.bench.peers import PEERS, Joined
from gossamer.bench.ranks import of_all
from gossamer.bench.sides import OverlapForward, join, parse_side
from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class Round:
    """A few steps of one side: seconds per step, and what else they cost this rank."""

    seconds: float
    counted: Counters


@dataclass(frozen=True, slots=True)
class Trained:
    """One side: its training step, and what takes it.

    ``payload_bytes``: what a step sends, known beforehand, where nobody counts it.
    """

    step: Callable[[], None]
    joined: Joined
    overlaps: bool
    """Whether what is exchanged may travel during the next step's compute."""
    payload_bytes: float | None
    period: int
    """After how many steps what travels repeats itself: it is timed in multiples of that."""

    def timed(self, steps: int) -> int:
        """How many steps of a round are timed: at least ``steps``."""
        return -(-steps // self.period) * self.period


def make_side(workload: Workload, side: str, rank: int) -> Trained:
    """A fresh model that communicates as ``side`` says."""
    torch.manual_seed(0)
    model, generator = workload.build_model(), torch.Generator().manual_seed(rank)
    parsed = parse_side(side)
    nbytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    made = join(parsed, model, workload.build_optimizer(model))

    def step() -> None:
        made.step(*workload.random_batch(generator), workload.loss)

    if isinstance(parsed, str):
        peer, world = PEERS[parsed], dist.get_world_size()
        known = None if peer.payload is None else 2 * (world - 1) / world * nbytes * peer.payload
        return Trained(step, made, peer.overlaps, known, peer.period)
    if isinstance(parsed, OverlapForward):
        return Trained(step, made, True, None, parsed.algorithm.traffic_period)
    if isinstance(parsed, Algorithm):
        return Trained(step, made, parsed.part("gradients") is None, None, parsed.traffic_period)
    return Trained(step, made, False, None, 1)


def take_turns(
    sides: dict[str, Trained], rounds: int, steps: int, told: Callable[[int], None] = lambda index: None
) -> dict[str, list[Round]]:
    """Every side's rounds: seconds per step, and what else the steps cost. ``told`` is called before every round."""
    results: dict[str, list[Round]] = {name: [] for name in sides}
    names = list(sides)
    for index in range(rounds):
        told(index)
        turn = index // 2 % len(names)
        order = names[turn:] + names[:turn]
        for name in order if index % 2 == 0 else reversed(order):
            results[name].append(_time(sides[name], steps))
    return results


def _time(side: Trained, steps: int) -> Round:
    with side.joined.turn():
        for _ in range(side.period):
            side.step()  # what the side before left in caches and token buckets is not this side's
        before = Counters.read(side.joined.replica)
        _meet(side)
        begin, steps = time.perf_counter(), side.timed(steps)
        for _ in range(steps):
            side.step()
        _meet(side)
        seconds = (time.perf_counter() - begin) / steps
        counted = Counters.read(side.joined.replica).per_step(before, steps)
        side.joined.model.zero_grad()  # while others take their turns, their memory is needed
        return Round(seconds, counted)


def warm_up(side: Trained, steps: int) -> None:
    """Train at least so many steps."""
    with side.joined.turn():
        for _ in range(side.timed(steps)):
            side.step()
        _meet(side)
        side.joined.model.zero_grad()


def _meet(side: Trained) -> None:
    if side.joined.replica is not None:
        side.joined.replica.catch_up()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    dist.barrier()


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
        "reference_seconds": statistics.median(reference),
        "ratio": float(np.median(ratios)),
        "ratio_low": low,
        "ratio_high": high,
    }


def tell(index: int, rounds: int) -> None:
    """Print from rank 0 which round begins."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"round": index, "of": rounds}) + "\n")
        sys.stdout.flush()


def run(
    workload: Workload,
    sides: Sequence[str],
    rounds: int,
    steps: int,
    warmup: int = 4,
    told: Callable[[int, int], None] = tell,
) -> dict[str, Any]:
    """Time all ``sides`` that can run here; the first one is the reference of the ratios.

    ``told`` hears of every round, and of how many. Where plain TCP can be measured, and with a side ``compute``, every side
    also gets its bound: see :mod:`gossamer.bench.bound`.
    """
    rank = dist.get_rank()
    lacking = missing(sides)
    sides = [name for name in sides if name not in lacking]
    if not sides:
        raise ConfigurationError("none of the sides can run here: " + "; ".join(f"{k}: {v}" for k, v in lacking.items()))
    made = {name: make_side(workload, name, rank) for name in sides}
    lines_before = plain_tcp()
    ready = measure_ready(workload, rank)
    for side in made.values():
        warm_up(side, warmup)
    results, sent = _measure(made, rounds, steps, told)
    lines = [statistics.median(both) for both in map(operator.add, lines_before, plain_tcp())]
    figures = _figures(made, results, sent)
    if lines and "compute" in figures:
        _add_bounds(figures, of_all(sent), lines, ready, made)
    for side in made.values():
        side.joined.close()
    return {
        "workload": workload.name,
        "rounds": rounds,
        "steps_per_round": steps,
        "sides": figures,
        "missing": lacking,
        "seconds": {name: [each.seconds for each in results[name]] for name in made},
        "tcp_bits_per_second": min(lines) if lines else None,
    } | _conditions()


def _conditions() -> dict[str, Any]:
    """Where and under which load it was measured."""
    return {
        "world": dist.get_world_size(),
        "rate": os.environ.get("GOSSAMER_LAB_RATE", "unshaped"),
        "latency": float(os.environ.get("GOSSAMER_LAB_LATENCY_S", "0")),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
    }


@dataclass(frozen=True, slots=True)
class Sent:
    """What one side hands to the transport: payload bytes, and rounds of messages that follow each other."""

    payload_bytes: float
    messages: float


def _measure(
    made: dict[str, Trained], rounds: int, steps: int, told: Callable[[int, int], None]
) -> tuple[dict[str, list[Round]], dict[str, Sent]]:
    """Every side's rounds, and what it sends per step."""
    before = _sent(made)
    results = take_turns(made, rounds, steps, lambda index: told(index, rounds))
    # Over all rounds, because what a round's last step sends is still under way at its end.
    after, sent = _sent(made), dict[str, Sent]()
    for name, side in made.items():
        taken, then, now = rounds * (side.period + side.timed(steps)), before[name], after[name]
        payload = (now.payload_bytes - then.payload_bytes) / taken if side.payload_bytes is None else side.payload_bytes
        sent[name] = Sent(payload, (now.messages - then.messages) / taken)
    return results, sent


def _figures(made: dict[str, Trained], results: dict[str, list[Round]], sent: dict[str, Sent]) -> dict[str, dict[str, float]]:
    """Of every side: medians and ratios, means of what was counted, and what it sends."""
    seconds = [[each.seconds for each in results[name]] for name in made]
    compared = {name: compare(own, seconds[0]) for name, own in zip(made, seconds, strict=True)}
    return {name: compared[name] | _counted(results[name]) | asdict(sent[name]) for name in made}


def missing(sides: Sequence[str]) -> dict[str, str]:
    """Those of ``sides`` that cannot run on some rank, and why; the same on all ranks."""
    everyone = of_all(peers.missing(sides, load=True))
    return {name: reason for reasons in reversed(everyone) for name, reason in reasons.items()}


def _sent(sides: dict[str, Trained]) -> dict[str, Sent]:
    """What this rank's replicas have sent so far, with nothing under way."""
    sent = {}
    for name, side in sides.items():
        if side.joined.replica is not None:
            side.joined.replica.wait_for_exchanges()
        own = {} if side.joined.replica is None else side.joined.replica.metrics()
        sent[name] = Sent(own.get("bytes_sent", 0.0), own.get("messages_sent", 0.0))
    return sent


def _counted(rounds: Sequence[Round]) -> dict[str, float]:
    """The means of what was counted, of this rank and per step."""
    return {each.name: statistics.fmean(getattr(row.counted, each.name) for row in rounds) for each in fields(Counters)}


def _add_bounds(
    figures: dict[str, dict[str, float]],
    sent: Sequence[dict[str, Sent]],
    lines: Sequence[float],
    ready: Ready,
    sides: dict[str, Trained],
) -> None:
    """Add to each side's figures its bound; ``sent`` and ``lines`` are by rank."""
    step = figures["compute"]["step_seconds"]
    for name, figure in figures.items():
        if name in PEERS and PEERS[name].payload is None:
            continue
        seconds = wire([each[name].payload_bytes for each in sent], lines)
        bound = overlapped(step, seconds) if sides[name].overlaps else joined(step, seconds, ready.within(step))
        figure["bound_seconds"] = bound


def main() -> None:
    """Take the turns and print from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a Python file, or an emulated model such as 'ResNet50(2.0)'")
    parser.add_argument("--sides", nargs="+", default=["ddp", "ddp-again", "AllReduce()", "Gossip(wire='bf16')"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    result = run(find_workload(options.workload), options.sides, options.rounds, options.steps, options.warmup)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
