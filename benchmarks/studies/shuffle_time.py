"""Shuffle time: what samples that travel add to the step, beside the same samples that stay, on emulated hosts.

Two methods train in the same processes and take turns: one on batches of a share that stays in its worker's memory, one on
those of a RingShuffle of the same share. What is exposed is the difference of their step times in the same round, whatever
it is made of: the loop that stands still for a batch, cores that pack and unpack it, other messages that it slows down.
"""

import argparse
import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.studies.harness import AS_RANK, Study, console, parser_of, spread
from benchmarks.studies.shuffle import Shard, endless, staying
from gossamer.bench.cases import Turns
from gossamer.bench.catalogue import find_workload
from gossamer.bench.conditions import conditions, load
from gossamer.bench.in_lab import lab_result
from gossamer.bench.methods import parse_method
from gossamer.bench.peers import BASELINE
from gossamer.bench.ratios import ENOUGH, compare, ends, require_scipy
from gossamer.bench.rows import Column, Record, Store, milliseconds, number, text
from gossamer.bench.trained import MODEL_SEED, make_method, pace
from gossamer.bench.turns import take_turns, warm_up
from gossamer.bench.workload import Workload
from gossamer.data import RingShuffle
from gossamer.lab import LabSpec

WORKLOADS = ("examples/02_convnet.py", "Convnet(0.1)")
"""The same twice: computed, by workers that share this machine's cores, and emulated, so that the network decides."""

METHODS = (BASELINE, "Gossip(wire='bf16')")
"""What else travels: nothing at all, or the weights."""

STORED = ("float32", "uint8")
"""How the pixels of a sample are kept, and so how many bytes travel."""

KEY = ("workload", "samples", "method", "stored", "hosts", "network")
"""What a case is known by."""


def share_of(workload: Workload, rank: int, batches: int, stored: str) -> Shard:
    """So many random batches as one worker's share: inputs kept as ``stored``, and labels."""
    generator = torch.Generator().manual_seed(rank)
    drawn = [workload.random_batch(generator) for _ in range(batches)]
    inputs, targets = (torch.cat(parts) for parts in zip(*drawn, strict=True))
    return (inputs.mul(255).to(torch.uint8) if stored == "uint8" else inputs), targets


def fed(workload: Workload, batches: Iterator[Shard], emulated: bool) -> Workload:
    """The workload on these batches; one with emulated compute takes them, and trains on what it always does."""

    def following(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        inputs, targets = next(batches)
        inputs = inputs if inputs.is_floating_point() else inputs.float().div_(255)
        return workload.random_batch(generator) if emulated else (inputs, targets)

    return replace(workload, random_batch=following)


def measure(workload: Workload, samples: Workload, method: str, stored: str, turns: Turns, batches: int) -> Record:
    """Step times of ``method`` on ``samples`` that travel and on samples that stay, by round; and how long the loop waited."""
    rank, rounds, steps, load_before = dist.get_rank(), turns.rounds, turns.steps, load()
    own = share_of(samples, rank, batches, stored)
    batch = len(own[1]) // batches
    with RingShuffle(own, batch) as shuffle:
        sources = {"staying": staying(own, batch, rank, 0), "travelling": endless(shuffle)}
        made = {name: make_method(fed(workload, each, samples is not workload), method, rank) for name, each in sources.items()}
        for trained in made.values():
            warm_up(trained, turns.warmup)
        before = shuffle.waited_seconds
        common = pace(made.values(), steps)
        results = take_turns(made, rounds, common)
        waited = (shuffle.waited_seconds - before) / (rounds * common.of(made["travelling"]).taken)
        for trained in made.values():
            trained.joined.close()
    seconds = {name: [each.seconds for each in results[name]] for name in made}
    figures = compare(seconds["travelling"], seconds["staying"])
    return {
        "workload": workload.name,
        "samples": samples.name,
        "method": method,
        "stored": stored,
        "hosts": dist.get_world_size(),
        "batch_bytes": sum(part[:batch].nbytes for part in own),
        "rounds": rounds,
        "steps_per_round": steps,
        **figures,
        "waited_seconds": waited,
        "waited_share": waited / figures["step_seconds"],
        "seconds": seconds,
        **conditions([method], load_before, {"model": MODEL_SEED, "samples and batches": "by rank"}),
    }


BAR = 0.03
"""The share of the step that samples may cost."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over the rounds, and from where to where: see :func:`gossamer.bench.ratios.ends`."""

    median: float
    low: float
    high: float

    def told(self, scale: float, decimals: int) -> str:
        """In words, each figure times ``scale``."""
        low, middle, high = (f"{scale * value:+.{decimals}f}" for value in (self.low, self.median, self.high))
        return f"{middle} ({low} to {high})"


def estimate(values: Sequence[float]) -> Estimate:
    """What the rounds say of a figure."""
    return Estimate(statistics.median(values), *ends(values))


def exposed(row: Record) -> tuple[Estimate, Estimate]:
    """What travelling adds to the step of the same round: in seconds, and as a share of the step with it."""
    rounds = list(zip(row["seconds"]["travelling"], row["seconds"]["staying"], strict=True))
    return estimate([with_it - alone for with_it, alone in rounds]), estimate(
        [1 - alone / with_it for with_it, alone in rounds]
    )


def verdict(share: Estimate, rounds: int) -> str:
    """Whether the whole interval lies below the bar, or above; of too few rounds there is none."""
    if rounds < ENOUGH:
        return "too few rounds"
    return "yes" if share.high < BAR else "no" if share.low >= BAR else "not shown"


def columns(rows: Sequence[Record]) -> Sequence[Column]:
    """What the table shows: one row per way to communicate and to keep the samples."""
    told = spread(rows)
    return (
        Column("workload", text("workload")),
        Column("hosts", text("hosts")),
        Column("network", text("network")),
        Column("communication", lambda row: "none" if row["method"] == BASELINE else f"`{row['method']}`"),
        Column("samples kept as", text("stored")),
        Column("a batch, kB", number("batch_bytes", "{:.0f}", 1e-3)),
        Column("rounds", text("rounds")),
        Column("ms per step, staying", milliseconds("reference_seconds")),
        Column("ms per step, travelling", milliseconds("step_seconds")),
        Column(
            f"travelling / staying ({told})",
            lambda row: f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})",
        ),
        Column(f"exposed, ms ({told})", lambda row: exposed(row)[0].told(1e3, 1)),
        Column(f"exposed, % of the step ({told})", lambda row: exposed(row)[1].told(100, 1)),
        Column(f"under {100 * BAR:g} %", lambda row: verdict(exposed(row)[1], row["rounds"])),
        Column("of it waited for a batch, ms", milliseconds("waited_seconds", "{:.2f}")),
    )


STUDY = Study("shuffle_time", KEY, columns, note=lambda rows: "")


def in_lab(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Every case in a lab of its own."""
    require_scipy()
    for name in {*options.workloads, options.samples_of}:
        find_workload(name)
    for method in options.methods:
        parse_method(method)
    for workload, method, stored in itertools.product(options.workloads, options.methods, options.stored):
        console.log(f"{workload}, {method}, samples kept as {stored}: {options.rounds} rounds")
        case = {"--workloads": workload, "--methods": method, "--stored": stored, "--samples-of": options.samples_of}
        case |= {f"--{name}": str(getattr(options, name)) for name in ("batches", "rounds", "steps", "warmup")}
        command = ["-m", "benchmarks.studies.shuffle_time", AS_RANK, *itertools.chain(*case.items())]
        row = lab_result(LabSpec(hosts=options.hosts, rate=options.network), command, "waited_seconds")
        console.log(f"exposed, % of the step: {exposed(row)[1].told(100, 1)}")
        yield {"network": options.network} | row


def on_ranks(options: argparse.Namespace) -> Iterator[Record]:
    """The first case, among the ranks of this launch."""
    name = options.workloads[0]
    workload = find_workload(name)
    samples = workload if name.endswith(".py") else find_workload(options.samples_of)
    turns = Turns(options.rounds, options.steps, options.warmup)
    yield measure(workload, samples, options.methods[0], options.stored[0], turns, options.batches)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every case; as a rank of the lab, print what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), help="Python files, or emulated models")
    parser.add_argument("--samples-of", default=WORKLOADS[0], help="a Python file: what travels with an emulated model")
    parser.add_argument(
        "--methods", nargs="+", default=list(METHODS), help="what else travels: compute (nothing), or algorithms"
    )
    parser.add_argument("--stored", nargs="+", default=list(STORED), choices=STORED, help="how the samples' pixels are kept")
    parser.add_argument("--batches", type=int, default=234, help="batches per local epoch; the default is Fashion-MNIST's")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--network", default="200mbit", help="the rate of every host's link")
    STUDY.main(parser, in_lab, arguments, on_ranks)


if __name__ == "__main__":
    main()
