"""Fresh: what is chosen by training on emulated networks, beside the methods of its class, measured right after.

Two models whose layers wait (a small convnet with SGD, a small transformer with AdamW), on networks from 20 Mbit/s to unshaped,
with a slow link, a slow host, added latency, and two hosts of two ranks. On each, the choice is made by training: plain
all-reduce, at most ten seconds of measuring, the method that was chosen, others on trial, and the one that proved fastest. Then
every method takes a few steps in the same replicas. A choice is right within 8 % of the fastest of its class (with Adam, 4 bits
are loose), and never more than 2 % slower than plain all-reduce (what DDP does).
"""

import argparse
import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.optim import SGD, AdamW, Optimizer

import gossamer
from benchmarks.studies.harness import AS_RANK, Study, console, measured_on, parser_of
from gossamer.bench.conditions import conditions, load
from gossamer.bench.emulated import Emulated, Layer, convolution, linear
from gossamer.bench.in_lab import lab_json
from gossamer.bench.network import parse_network
from gossamer.bench.rows import Column, Record, Store, number, text
from gossamer.planning import read_plan
from gossamer.planning.candidates import Fidelity
from gossamer.planning.chooser import LEARNING, TRIALS, WINDOW
from gossamer.planning.profile import STEPS
from gossamer.replica import Replica
from gossamer.spelled import algorithm_of

COMPUTE = 0.1
"""Seconds that a step computes."""

WARMUP, TIMED = 3, 8
"""Steps of each method: those that are timed are whole periods of all of them."""

RIGHT, BESIDE_DDP = 1.08, 1.02


@dataclass(frozen=True)
class Condition:
    """A model on a network of four ranks, and the class that is asked for."""

    model: str
    network: str
    fidelity: Fidelity
    per_host: int = 1


CONDITIONS = (
    Condition("convnet", "20mbit", "loose"),
    Condition("convnet", "50mbit", "close"),
    Condition("convnet", "200mbit", "close"),
    Condition("convnet", "unshaped", "loose"),
    Condition("convnet", "100mbit/slow-link=20mbit", "loose"),
    Condition("convnet", "50mbit", "loose", per_host=2),
    Condition("transformer", "20mbit", "close"),
    Condition("transformer", "50mbit+5ms", "close"),
    Condition("transformer", "100mbit", "loose"),
    Condition("transformer", "100mbit/slow-host=2x", "close"),
    Condition("transformer", "1gbit", "close"),
    Condition("transformer", "50mbit", "close", per_host=2),
)

METHODS: dict[Fidelity, tuple[str, ...]] = {
    "exact": ("AllReduce()",),
    "close": ("AllReduce(wire='bf16')", "ScatterReduce()", "ScatterReduce(codec=Quantize(bits=4))"),
    "loose": ("Gossip()", "QuantizedGossip()", "in_parts(4, Gossip())", "LocalSGD(every=4)"),
}
"""What is measured beside the choice, of each class; averages of weights with SGD alone, and by node where hosts have two."""


def layers(model: str) -> list[Layer]:
    """Of the convnet (0.3 million parameters, most in one layer), or of the transformer (0.5 million, evenly)."""
    if model == "convnet":
        return [
            convolution("conv1", 1, 16, 3, 28),
            convolution("conv2", 16, 32, 3, 14),
            linear("fc1", 1568, 192),
            linear("fc2", 192, 10),
        ]
    width = 96
    blocks = [
        [linear(f"mixing{number}", width, 4 * width), linear(f"perceptron{number}", width, 8 * width)] for number in range(4)
    ]
    return [Layer("embedding", ((512, width),), 0), *itertools.chain.from_iterable(blocks)]


def methods_of(condition: Condition) -> list[str]:
    """What is measured on a network."""
    there = ["AllReduce()", *METHODS["close"]]
    if condition.fidelity == "loose" and condition.model == "convnet":
        there += METHODS["loose"]
    if condition.per_host > 1:
        there += [f"Hierarchical({method})" for method in there if "Local" not in method and "wire" not in method]
    return there


class Trained:
    """A replica of a model on this rank, and what trains it."""

    def __init__(self, model: str, fidelity: Fidelity, path: Path) -> None:
        torch.manual_seed(0)
        self._model = Emulated(layers(model), COMPUTE)
        parameters = self._model.parameters()
        self._optimizer: Optimizer = (
            SGD(parameters, lr=1e-3, momentum=0.9) if model == "convnet" else AdamW(parameters, lr=1e-5)
        )
        self.replica: Replica = gossamer.replicate(self._model, self._optimizer, fidelity=fidelity, plan=path)
        self._signal = torch.rand(1)

    def steps(self, count: int) -> float:
        """Seconds of a step in the mean, of the slowest rank."""
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(count):
            self._optimizer.zero_grad()
            self._model(self._signal).sum().backward()
            self._optimizer.step()
        taken = torch.tensor([(time.perf_counter() - begin) / count])
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        return float(taken)

    def timed(self, method: str) -> float:
        """Seconds of a step of a method."""
        self.replica.switch(algorithm_of(method))
        self.steps(WARMUP)
        return self.steps(TIMED)


def measured(condition: Condition) -> Iterator[Record]:
    """On a rank: what is chosen, and what every method takes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.toml"
        trained = Trained(condition.model, condition.fidelity, path)
        trained.steps(LEARNING + STEPS + TRIALS * (LEARNING + WINDOW) + 1)
        told: list[Record] = [{}]
        if dist.get_rank() == 0:
            plan = read_plan(path)
            told = [
                {
                    "method": plan.method,
                    "predicted_seconds": plan.row.step_seconds,
                    "measuring_seconds": plan.facts.seconds,
                    "why": plan.why,
                }
            ]
    dist.broadcast_object_list(told)
    found = told[0]
    methods = list(dict.fromkeys([*methods_of(condition), found["method"]]))
    taken = {method: trained.timed(method) for method in methods}
    trained.replica.close()
    yield found | {"seconds": taken}


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Every condition that is not there yet, in a lab of its own."""
    for place, condition in enumerate(CONDITIONS):
        own = asdict(condition)
        if store.find(**own) is not None:
            continue
        console.log(str(condition))
        load_before, spec = load(), parse_network(condition.network).spec(4 // condition.per_host, waits=True)
        spec = type(spec).from_json(spec.to_json() | {"procs_per_host": condition.per_host})
        found = lab_json(spec, ["-m", "benchmarks.studies.fresh", AS_RANK, "--condition", str(place)])[-1]
        yield own | found | conditions([], load_before, {})


def of_class(row: Record) -> dict[str, float]:
    """The seconds of the methods that are of the class that was asked for: with Adam, 4 bits are loose."""
    loose = row["fidelity"] == "loose" or row["model"] == "convnet"
    return {method: seconds for method, seconds in row["seconds"].items() if loose or "bits=4" not in method}


def fastest(row: Record) -> str:
    """The fastest of the class."""
    found = of_class(row)
    return min(found, key=lambda method: found[method])


def beside(row: Record) -> tuple[float, float]:
    """The step of the choice, relative to the fastest of its class, and to plain all-reduce."""
    chosen = row["seconds"][row["method"]]
    return chosen / row["seconds"][fastest(row)], chosen / row["seconds"]["AllReduce()"]


def counted(rows: Sequence[Record]) -> str:
    """How many choices are right."""
    right = sum(beside(row)[0] <= RIGHT for row in rows)
    slower = sum(beside(row)[1] > BESIDE_DDP for row in rows)
    longest = max(row["measuring_seconds"] for row in rows)
    return (
        f"Within 8 % of the fastest: {right} of {len(rows)}; more than 2 % slower than plain all-reduce: {slower}. Measuring "
        f"took at most {longest:.1f} s. {measured_on(rows)}"
    )


COLUMNS = (
    Column("model", text("model")),
    Column(
        "network",
        lambda row: row["network"] + (f", {4 // row['per_host']} hosts of {row['per_host']}" if row["per_host"] > 1 else ""),
    ),
    Column("class", text("fidelity")),
    Column("chosen", lambda row: f"`{row['method']}`"),
    Column("predicted, ms", number("predicted_seconds", "{:.0f}", 1e3)),
    Column("measured, ms", lambda row: f"{1e3 * row['seconds'][row['method']]:.0f}"),
    Column("fastest", lambda row: f"`{fastest(row)}`"),
    Column("beside the fastest", lambda row: f"{beside(row)[0]:.3f}" + ("" if beside(row)[0] <= RIGHT else " ✗")),
    Column("beside plain all-reduce", lambda row: f"{beside(row)[1]:.3f}"),
)

STUDY = Study("fresh", ("model", "network", "fidelity", "per_host"), lambda rows: COLUMNS, note=counted)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; as a rank of the lab, print what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--condition", type=int, help=argparse.SUPPRESS)
    STUDY.main(parser, measure, arguments, lambda options: measured(CONDITIONS[options.condition]))


if __name__ == "__main__":
    main()
