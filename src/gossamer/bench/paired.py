"""Paired timing: several ways to communicate take turns at the same training steps, in one run on the same machine.

A script of the lab; rank 0 prints one JSON object:

    gossamer lab --hosts 4 --rate 200mbit -- -m gossamer.bench.paired --workload examples/02_convnet.py

Every method trains its own copy of the model. A round is a few steps of each method, barrier to barrier, the order of the
methods alternating from round to round; what counts is the ratio of two methods within a round.
"""

import argparse
import json
import operator
import os
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, fields
from typing import Any

import torch.distributed as dist

from gossamer.bench import peers
from gossamer.bench.bound import Ready, layered, least, measure_ready, wire
from gossamer.bench.catalogue import find_workload
from gossamer.bench.conditions import conditions, load, of_hosts
from gossamer.bench.counters import Counters
from gossamer.bench.link import plain_tcp
from gossamer.bench.peers import BASELINE
from gossamer.bench.ranks import of_all
from gossamer.bench.ratios import compare, paired_ratio
from gossamer.bench.trained import MODEL_SEED, Pace, Trained, make_method, named, pace
from gossamer.bench.turns import Round, take_turns, warm_up
from gossamer.bench.workload import Workload
from gossamer.errors import ConfigurationError, GossamerError

Figures = dict[str, Any]
Told = Callable[[int, int], None]


def tell(index: int, rounds: int) -> None:
    """Print from rank 0 which round begins."""
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps({"round": index, "of": rounds}) + "\n")
        sys.stdout.flush()


def run(
    workload: Workload,
    methods: Sequence[str],
    rounds: int,
    steps: int,
    warmup: int = 4,
    told: Told = tell,
) -> dict[str, Any]:
    """Time all ``methods`` that can run here; the first one is the reference of the ratios.

    ``told`` is called for every round. Where plain TCP can be measured, and with a method ``compute``, every method also gets
    its bound: see :mod:`gossamer.bench.bound`.
    """
    rank, load_before = dist.get_rank(), load()
    lacking = missing(methods)
    methods = [name for name in methods if name not in lacking]
    if not methods:
        raise ConfigurationError("none of the methods can run here: " + "; ".join(f"{k}: {v}" for k, v in lacking.items()))
    made = {}
    for name in methods:
        with named(name):
            made[name] = make_method(workload, name, rank)
    links_before = plain_tcp()
    ready = measure_ready(workload, rank, forward=any(method.when == "layered" for method in made.values()))
    for name, method in made.items():
        with named(name):
            warm_up(method, warmup)
    common = pace(made.values(), steps)
    begun = {name: method.phase(method.timed(warmup)) for name, method in made.items()}
    results, sent = _measure(made, rounds, common, told)
    links = [statistics.median(both) for both in map(operator.add, links_before, plain_tcp())]
    figures = _figures(made, results, sent, common)
    for name, method in made.items():
        if method.phase(method.timed(warmup) + rounds * common.of(method).taken - 1) != begun[name]:
            figures[name]["two_phases"] = True
    if links and BASELINE in figures:
        rows = of_all({name: astuple(each) for name, each in sent.items()})
        everyone = [{name: Sent(*row) for name, row in each.items()} for each in rows]
        _add_bounds(figures, everyone, links, ready, made)
    _close(made)
    return {
        "workload": workload.name,
        "rounds": rounds,
        "steps_per_round": steps,
        "warmup": warmup,
        "methods": figures,
        "missing": lacking,
        "seconds": {name: [each.seconds for each in results[name]] for name in made},
        "tcp_bits_per_second": min(links) if links else None,
        "world": dist.get_world_size(),
        "rate": os.environ.get("GOSSAMER_LAB_RATE", "unshaped"),
        "latency": float(os.environ.get("GOSSAMER_LAB_LATENCY_S", "0")),
        "conditions": _conditions(methods, load_before),
    }


def _conditions(methods: Sequence[str], load_before: float) -> Figures:
    """Of this rank, with the loads of the busiest host and what else the hosts of a cluster differ in."""
    seeds = {"model": MODEL_SEED, "batches": list(range(dist.get_world_size()))}
    told = conditions(methods, load_before, seeds) | of_hosts()
    return told | {name: max(of_all(told[name])) for name in ("load_before", "load_after")}


def _close(made: dict[str, Trained]) -> None:
    """End what the methods have started. All is measured then: one that does not end well is told, and takes nothing along."""
    for name, method in made.items():
        try:
            method.joined.close()
        except GossamerError as error:
            sys.stderr.write(f"rank {dist.get_rank()}, {name}: {error}\n")


@dataclass(frozen=True, slots=True)
class Sent:
    """What a method sends: payload bytes (None: unknown), and messages one after the other."""

    payload_bytes: float | None
    messages: float


def _measure(made: dict[str, Trained], rounds: int, common: Pace, told: Told) -> tuple[dict[str, list[Round]], dict[str, Sent]]:
    """Every method's rounds, and what it sends per step."""
    before = _sent(made)
    results = take_turns(made, rounds, common, lambda index: told(index, rounds))
    # Over all rounds, because what a round's last step sends is still under way at its end.
    after, sent = _sent(made), dict[str, Sent]()
    for name, method in made.items():
        taken, then, now = rounds * common.of(method).taken, before[name], after[name]
        counted = [each.payload_bytes for each in (then, now) if each.payload_bytes is not None]
        payload = (counted[1] - counted[0]) / taken if counted else method.payload_bytes
        sent[name] = Sent(payload, (now.messages - then.messages) / taken)
    return results, sent


def _figures(
    made: dict[str, Trained], results: dict[str, list[Round]], sent: dict[str, Sent], common: Pace
) -> dict[str, Figures]:
    """Of every method: how it was timed, medians and ratios, means of what was counted, and what it sends."""
    seconds = {name: [each.seconds for each in rounds] for name, rounds in results.items()}
    first = next(iter(seconds.values()))
    return {
        name: asdict(common.of(method))
        | compare(seconds[name], first)
        | _beside_compute(seconds, name)
        | _counted(results[name])
        | asdict(sent[name])
        for name, method in made.items()
    }


def _beside_compute(seconds: dict[str, list[float]], name: str) -> Figures:
    """The step time of ``compute`` in the same run, and the ratio to it with its spread; nothing in a run without it."""
    if BASELINE not in seconds:
        return {}
    alone = seconds[BASELINE]
    middle, low, high = paired_ratio(seconds[name], alone)
    ratio = {"ratio_to_compute": middle, "ratio_to_compute_low": low, "ratio_to_compute_high": high}
    return {"compute_seconds": statistics.median(alone)} | ratio


def missing(methods: Sequence[str]) -> dict[str, str]:
    """Those of ``methods`` that cannot run on some rank, and why; the same on all ranks."""
    everyone = of_all(peers.missing(methods, load=True))
    return {name: reason for reasons in reversed(everyone) for name, reason in reasons.items()}


def _sent(methods: dict[str, Trained]) -> dict[str, Sent]:
    """What this rank's replicas have sent so far, with nothing under way; of others nobody counts the payload."""
    sent = {}
    for name, method in methods.items():
        if method.joined.replica is not None:
            method.joined.replica.wait_for_exchanges()
        own = {} if method.joined.replica is None else method.joined.replica.metrics()
        sent[name] = Sent(own.get("bytes_sent"), own.get("messages_sent", 0.0))
    return sent


def _counted(rounds: Sequence[Round]) -> Figures:
    """The means of what was counted, of this rank and per step."""
    means = {each.name: statistics.fmean(getattr(row.counted, each.name) for row in rounds) for each in fields(Counters)}
    # What another backend than Gloo sends need not go through an interface of the host.
    return means if dist.get_backend() == "gloo" else means | {"interface_bytes": None}


def _add_bounds(
    figures: dict[str, Figures], sent: Sequence[dict[str, Sent]], links: Sequence[float], ready: Ready, made: dict[str, Trained]
) -> None:
    """Add each bound, and with the forward pass overlapped what the layers allow; ``sent`` and ``links`` are by rank.

    None where a payload is not known: what has left the interface is no less than that, so it would be no bound.
    """
    step = figures[BASELINE]["step_seconds"]
    for name, figure in figures.items():
        payloads = [each[name].payload_bytes for each in sent]
        known = [payload for payload in payloads if payload is not None]
        if len(known) == len(payloads):
            when, on_the_wire = made[name].when, wire(known, links)
            figure["bound_seconds"] = least(when, step, on_the_wire, ready)
            if when == "layered":
                figure["layered_bound_seconds"] = layered(step, on_the_wire, ready)


def main() -> None:
    """Take the turns and print from rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", required=True, help="a Python file, or an emulated model such as 'ResNet50(2.0)'")
    parser.add_argument("--methods", nargs="+", default=["ddp", "ddp-again", "AllReduce()", "Gossip(wire='bf16')"])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    result = run(find_workload(options.workload), options.methods, options.rounds, options.steps, options.warmup)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(result) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
