"""Threads: whose processor time a training step takes: the loop's, the lanes', the transport's, and the whole machine's.

A profile of what stands beside the model's own computation, on emulated hosts. Linux only: it reads ``/proc``.
"""

import argparse
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from benchmarks.studies.harness import AS_RANK, Study, console, parser_of
from gossamer.bench.catalogue import find_workload
from gossamer.bench.conditions import conditions, load
from gossamer.bench.in_lab import lab_json
from gossamer.bench.methods import parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.rows import Column, Record, Store, code, milliseconds, text
from gossamer.bench.trained import make_method
from gossamer.bench.turns import warm_up

WORKLOADS = ("examples/02_convnet.py", "examples/01_gpt.py")
METHODS = ("compute", "ddp", "AllReduce()", "ScatterReduce()", "ChunkSparse()", "Gossip(wire='bf16')", "in_parts(8, Gossip())")
LOOP, LANES, TRANSPORT, OTHERS = "the loop", "lanes", "transport", "others"
WARM_UP = 16
_TICK = 1 / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Spent:
    """Seconds of processor time so far: by kind of thread of this process, in the kernel, and of the whole machine."""

    by_kind: dict[str, float]
    kernel: float
    machine: float

    @classmethod
    def read(cls) -> "Spent":
        """As of now."""
        by_kind, kernel = dict.fromkeys((LOOP, LANES, TRANSPORT, OTHERS), 0.0), 0.0
        named = {thread.native_id: thread.name for thread in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            try:
                head, _, rest = (task / "stat").read_text().rpartition(")")
            except OSError:  # it has ended
                continue
            fields, name = rest.split(), head.partition("(")[2]
            user, system = int(fields[11]) * _TICK, int(fields[12]) * _TICK
            by_kind[kind(int(task.name), named.get(int(task.name), ""), name)] += user + system
            kernel += system
        return cls(by_kind, kernel, _machine())

    def since(self, before: "Spent", steps: int) -> dict[str, float]:
        """Seconds per step, by kind of thread; ``kernel`` and ``machine`` beside them."""
        found = {name: (seconds - before.by_kind[name]) / steps for name, seconds in self.by_kind.items()}
        return found | {"kernel": (self.kernel - before.kernel) / steps, "machine": (self.machine - before.machine) / steps}


def kind(task: int, python_name: str, name: str) -> str:
    """What a thread is for; the main one is that of the loop."""
    if task == os.getpid():
        return LOOP
    if python_name.startswith("gossamer"):
        return LANES
    return TRANSPORT if "gloo" in name else OTHERS


def _machine() -> float:
    """What all processors of the machine have done, in user mode, in the kernel and in interrupts."""
    user, nice, system, _, _, irq, softirq = map(int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8])
    return (user + nice + system + irq + softirq) * _TICK


def measure(workload: str, methods: Sequence[str], steps: int) -> Iterator[Record]:
    """On each rank: the step time of every method, one after the other, and the processor time of this process."""
    made = find_workload(workload)
    for name in methods:
        method = make_method(made, name, dist.get_rank())
        warm_up(method, WARM_UP)
        dist.barrier()
        before, begin = Spent.read(), time.perf_counter()
        for _ in range(steps):
            method.step()
        dist.barrier()
        seconds, spent = (time.perf_counter() - begin) / steps, Spent.read().since(before, steps)
        found = {"workload": made.name, "hosts": dist.get_world_size(), "method": name, "steps": steps}
        yield found | {"step_seconds": seconds, "spent": spent}
        method.joined.close()


def _spent(name: str) -> Callable[[Record], str]:
    return lambda row: f"{1e3 * row['spent'][name]:.1f}"


COLUMNS = (
    Column("workload", text("workload")),
    Column("network", text("network")),
    Column("method", code("method")),
    Column("ms per step", milliseconds("step_seconds")),
    *(Column(f"{name}, ms", _spent(name)) for name in (LOOP, LANES, TRANSPORT, OTHERS)),
    Column("of these in the kernel, ms", _spent("kernel")),
    Column("the machine per worker, ms", lambda row: f"{1e3 * row['spent']['machine'] / row['hosts']:.1f}"),
)

STUDY = Study("threads", ("workload", "network", "hosts", "method"), lambda rows: COLUMNS)


def in_lab(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Every workload in a lab of its own."""
    for method in options.methods:
        parse_method(method)
    spec = parse_network(options.network).spec(options.hosts, waits=False)
    for workload in options.workloads:
        console.log(f"{workload} on {options.network}: {len(options.methods)} methods, {options.steps} steps of each")
        before = load()
        command = ["-m", "benchmarks.studies.threads", AS_RANK, "--workloads", workload, "--steps", str(options.steps)]
        found = lab_json(spec, [*command, "--methods", *options.methods])
        yield from (row | {"network": options.network} | conditions(options.methods, before, 0) for row in found)


def on_ranks(options: argparse.Namespace) -> Iterator[Record]:
    """Measure among the ranks of this launch."""
    return measure(options.workloads[0], options.methods, options.steps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure in the lab; as a rank of the lab, print what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--network", default="200mbit", help="as in gossamer bench")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    STUDY.main(parser, in_lab, arguments, on_ranks)


if __name__ == "__main__":
    main()
