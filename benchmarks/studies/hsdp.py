"""HSDP: steps of a model that is sharded inside each host, over what moves between the hosts.

Two emulated hosts of two workers. FSDP2 shards the model over the two of a host. Between the hosts FSDP2 all-reduces the shards
itself (HSDP), or leaves them to gossamer, on the dimension of the mesh that replicates. Beside them the same model whole, whose
workers of a host average exactly (``Hierarchical``): between the hosts it sends what the shards do. Layers wait instead of
computing (emulated compute), so that the network decides, and all methods take turns in the same processes.

The bound: compute is the step in which nothing travels between hosts, sharded or whole; wire is what a host sends over the rate
of its link. A gradient travels between its readiness and the step, weights beside all of the compute.
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from benchmarks.studies.harness import AS_RANK, Study, console, parser_of, spread
from gossamer.algorithms import Algorithm
from gossamer.bench.bound import When, least, measure_ready
from gossamer.bench.cases import Turns
from gossamer.bench.conditions import conditions, load
from gossamer.bench.emulated import Emulated, Layer
from gossamer.bench.in_lab import lab_json
from gossamer.bench.methods import algorithm_of, parse_method
from gossamer.bench.peers import Joined
from gossamer.bench.ratios import compare, require_scipy
from gossamer.bench.rows import Column, Record, Store, milliseconds, number, text
from gossamer.bench.trained import MODEL_SEED, Trained, pace
from gossamer.bench.turns import take_turns, warm_up
from gossamer.bench.workload import Workload
from gossamer.lab import LabSpec
from gossamer.lab.rates import parse_rate

HOSTS, WORKERS = 2, 2
"""Hosts, and the workers of each."""

COMPUTE, HSDP, DDP = "compute", "HSDP", "DDP"
"""Nothing between hosts (and FSDP2 inside each, if sharded); FSDP2 over both dimensions; PyTorch's DDP over all workers."""

SHARDED = (
    "AllReduce()",
    "AllReduce(wire='bf16')",
    "ScatterReduce()",
    "Gossip()",
    "Gossip(wire='bf16')",
    "in_parts(2, Gossip(wire='bf16'))",
    "DiLoCo(every=4)",
)
"""What gossamer runs between the shards."""

WHOLE = ("AllReduce()", "Gossip()", "Gossip(wire='bf16')")
"""The same between hosts whose workers hold the whole model."""


def transformer(blocks: int = 6, width: int = 192, words: int = 1024) -> list[Layer]:
    """2.9 million parameters in the shapes of a GPT."""
    layers = [Layer("embedding", ((words, width),), words * width)]
    for number_of in range(blocks):
        shapes = ((width,), (3 * width, width), (width, width), (width,), (4 * width, width), (width, 4 * width))
        layers.append(Layer(f"block{number_of}", shapes, 12 * width * width))
    return layers


def workload(seconds: float) -> Workload:
    """The transformer with so many seconds of compute per step."""
    return Workload(
        f"transformer, {seconds:g} s emulated",
        build_model=lambda: Emulated(transformer(), seconds),
        build_optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
        random_batch=lambda generator: (torch.rand(1, generator=generator), torch.zeros(1)),
        loss=lambda outputs, targets: (outputs - targets).sum(),
    )


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    """FSDP2 of every layer, and of the rest."""
    assert isinstance(model, Emulated)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to train: its name, whether the model is sharded, what gossamer runs, and what is made of a bare model."""

    name: str
    sharded: bool
    algorithm: Algorithm | None
    join: Callable[[nn.Module, torch.optim.Optimizer, DeviceMesh], tuple[nn.Module, gossamer.Replica | None]]
    prepare: Callable[[nn.Module, DeviceMesh], None] = lambda model, mesh: None

    @property
    def when(self) -> When:
        """When what travels between hosts may travel."""
        weights = self.algorithm is not None and self.algorithm.traits.subject == "weights"
        return "overlapped" if weights else "joined"


def ways() -> Mapping[str, Way]:
    """By a name that tells sharded and whole ones apart."""
    found = [
        Way(COMPUTE, True, None, lambda model, _, mesh: (model, None), lambda model, mesh: shard(model, mesh["shard"])),
        Way(HSDP, True, None, lambda model, _, mesh: (model, None), shard),
        *(_between_shards(name) for name in SHARDED),
        Way(COMPUTE, False, None, lambda model, _, mesh: (model, None)),
        Way(DDP, False, None, lambda model, _, mesh: (nn.parallel.DistributedDataParallel(model), None)),
        *(_between_hosts(name) for name in WHOLE),
    ]
    return {f"{way.name}, {'sharded' if way.sharded else 'whole'}": way for way in found}


def _between_shards(name: str) -> Way:
    algorithm = algorithm_of(parse_method(name))

    def join(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> tuple[nn.Module, gossamer.Replica]:
        return model, gossamer.replicate(model, optimizer, algorithm, mesh=mesh["replicate"])

    return Way(name, True, algorithm, join, lambda model, mesh: shard(model, mesh["shard"]))


def _between_hosts(name: str) -> Way:
    algorithm = algorithm_of(parse_method(f"Hierarchical({name})"))

    def join(model: nn.Module, optimizer: torch.optim.Optimizer, mesh: DeviceMesh) -> tuple[nn.Module, gossamer.Replica]:
        return model, gossamer.replicate(model, optimizer, algorithm, mesh=mesh)

    return Way(f"Hierarchical({name})", False, algorithm, join)


def trained(way: Way, workload: Workload, mesh: DeviceMesh) -> Trained:
    """A fresh model that is trained in this way."""
    torch.manual_seed(MODEL_SEED)
    model, generator = workload.build_model(), torch.Generator().manual_seed(dist.get_rank())
    way.prepare(model, mesh)
    optimizer = workload.build_optimizer(model)
    called, replica = way.join(model, optimizer, mesh)
    made = Joined(called, optimizer, close=(lambda: None) if replica is None else replica.close, replica=replica)
    period = 1 if way.algorithm is None else way.algorithm.cadence.period
    return Trained(lambda: made.step(*workload.random_batch(generator), workload.loss), made, way.when, None, period)


def measure(workload: Workload, turns: Turns, rate: float) -> Iterator[Record]:
    """The rows of all ways, from interleaved rounds."""
    mesh, load_before = init_device_mesh("cpu", (HOSTS, WORKERS), mesh_dim_names=("replicate", "shard")), load()
    known = ways()
    made = {name: trained(way, workload, mesh) for name, way in known.items()}
    for each in made.values():
        warm_up(each, turns.warmup)
    results = take_turns(made, turns.rounds, pace(made.values(), turns.steps))
    seconds = {name: [each.seconds for each in rounds] for name, rounds in results.items()}
    ready = measure_ready(workload)
    for name, way in known.items():
        compute = statistics.median(seconds[f"{COMPUTE}, {'sharded' if way.sharded else 'whole'}"])
        sent = WORKERS * statistics.median(each.counted.interface_bytes for each in results[name])
        bound = least(way.when, compute, 8 * sent / rate, ready)
        yield {
            "workload": workload.name,
            "method": way.name,
            "model": "sharded" if way.sharded else "whole",
            "rounds": turns.rounds,
            **compare(seconds[name], seconds[f"{HSDP}, sharded"]),
            "compute_seconds": compute,
            "host_bytes": sent,
            "bound_seconds": bound,
            "over_bound": statistics.median(seconds[name]) / bound,
            "seconds": seconds[name],
            **conditions([], load_before, {"model": MODEL_SEED, "batches": "by rank"}),
        }
    for each in made.values():
        each.joined.close()


def columns(rows: Sequence[Record]) -> Sequence[Column]:
    """What the table shows."""
    return (
        Column("workload", text("workload")),
        Column("between hosts", text("network")),
        Column("model", text("model")),
        Column("method", lambda row: f"`{row['method']}`" if "(" in row["method"] else row["method"]),
        Column("ms per step", milliseconds("step_seconds", "{:.0f}")),
        Column(
            f"relative to HSDP ({spread(rows)})",
            lambda row: f"{row['ratio']:.3f} ({row['ratio_low']:.3f} to {row['ratio_high']:.3f})",
        ),
        Column("a host sends, MB", number("host_bytes", "{:.2f}", 1e-6)),
        Column("bound, ms", milliseconds("bound_seconds", "{:.0f}")),
        Column("step / bound", number("over_bound", "{:.2f}")),
    )


def note(rows: Sequence[Record]) -> str:
    """Where and how it was measured."""
    first = rows[0]
    return (
        f"{first['cores']} cores of {first['processor']}; torch {first['torch']}; {HOSTS} hosts of {WORKERS} workers; "
        f"{first['rounds']} rounds. In `compute` nothing travels between hosts. On CPUs FSDP2 waits for "
        "its collectives in the training thread, so HSDP's all-reduce hides behind nothing."
    )


STUDY = Study("hsdp", ("workload", "network", "model", "method"), columns, note=note)


def in_lab(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """All ways, on emulated hosts."""
    require_scipy()
    console.log(f"{len(ways())} ways to train, {options.rounds} rounds, {options.network} between hosts")
    given = {f"--{name}": str(getattr(options, name)) for name in ("network", "compute", "rounds", "steps", "warmup")}
    command = ["-m", "benchmarks.studies.hsdp", AS_RANK, *itertools.chain(*given.items())]
    spec = LabSpec(hosts=HOSTS, procs_per_host=WORKERS, rate=options.network)
    for row in lab_json(spec, command):
        console.log(f"{row['method']}, {row['model']}: {1e3 * row['step_seconds']:.0f} ms, {row['ratio']:.3f} of HSDP's")
        yield {"network": options.network} | row


def on_ranks(options: argparse.Namespace) -> Iterator[Record]:
    """All ways, among the ranks of this launch."""
    torch.set_num_threads(1)
    turns = Turns(options.rounds, options.steps, options.warmup)
    yield from measure(workload(options.compute), turns, parse_rate(options.network).bps or float("inf"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all ways; as a rank of the lab, print what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--network", default="200mbit", help="the rate of every host's link")
    parser.add_argument("--compute", type=float, default=0.3, help="seconds that a step of the model computes")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=4)
    STUDY.main(parser, in_lab, arguments, on_ranks)


if __name__ == "__main__":
    main()
