"""Threads: whose processor time a training step takes: the loop's, the lanes', the transport's, and the whole machine's.

    python -m benchmarks.studies.threads --save-to benchmarks/results

A profile of what stands beside the model's own computation, on emulated hosts. Linux only: it reads ``/proc``.
"""

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console

from gossamer.bench.catalogue import find_workload
from gossamer.bench.conditions import busy_machine, conditions, load
from gossamer.bench.in_lab import lab_result
from gossamer.bench.methods import parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.paired import warm_up
from gossamer.bench.rows import markdown, merged, read_rows, write_rows
from gossamer.bench.trained import make_method
from gossamer.errors import GossamerError

WORKLOADS = ("examples/02_convnet.py", "examples/01_gpt.py")
METHODS = ("compute", "ddp", "AllReduce()", "ScatterReduce()", "ChunkSparse()", "Gossip(wire='bf16')", "in_parts(8, Gossip())")
LOOP, LANES, TRANSPORT, OTHERS = "the loop", "lanes", "transport", "others"
WARM_UP = 16
_TICK = 1 / os.sysconf("SC_CLK_TCK")

console = Console(stderr=True)


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


def measure(workload: str, methods: Sequence[str], steps: int) -> dict[str, Any]:
    """On each rank: the step time of every method, one after the other, and the processor time of this process."""
    made = find_workload(workload)
    found: dict[str, Any] = {}
    for name in methods:
        method = make_method(made, name, dist.get_rank())
        warm_up(method, WARM_UP)
        dist.barrier()
        before, begin = Spent.read(), time.perf_counter()
        for _ in range(steps):
            method.step()
        dist.barrier()
        seconds, spent = (time.perf_counter() - begin) / steps, Spent.read().since(before, steps)
        found[name] = {"step_seconds": seconds, "spent": spent}
        method.joined.close()
    return {"workload": made.name, "world": dist.get_world_size(), "steps": steps, "threads": found}


def table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown: one line per method."""
    head = (
        "workload", "network", "method", "ms per step", *(f"{name}, ms" for name in (LOOP, LANES, TRANSPORT, OTHERS)),
        "of these in the kernel, ms", "the machine per worker, ms",
    )  # fmt: skip
    lines = []
    for row in rows:
        for method, figures in row["threads"].items():
            spent = figures["spent"]
            own = [spent[name] for name in (LOOP, LANES, TRANSPORT, OTHERS, "kernel")]
            numbers = [figures["step_seconds"], *own, spent["machine"] / row["world"]]
            lines.append([row["workload"], row["network"], f"`{method}`", *(f"{1e3 * number:.1f}" for number in numbers)])
    return markdown(head, lines)


def save(folder: Path, row: dict[str, Any]) -> None:
    """Write ``threads.jsonl`` and ``threads.md``: a row, and those of other workloads and networks that are there already."""
    path = folder / "threads.jsonl"
    rows = merged(read_rows(path), [row], ("workload", "network", "world"))
    write_rows(path, rows)
    (folder / "threads.md").write_text("\n".join(table(rows)) + "\n")
    console.log(f"wrote {folder / 'threads.md'} and {path}")


def main() -> None:
    """Measure in the lab, and save ``threads.jsonl`` and ``threads.md``; as a rank of the lab, print what was measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-to", type=Path, default=Path("out/threads"))
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS))
    parser.add_argument("--network", default="200mbit", help="as in gossamer bench")
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--steps", type=int, default=128)
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        dist.init_process_group("gloo")
        found = measure(options.workloads[0], options.methods, options.steps)
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
        dist.barrier()
        dist.destroy_process_group()
        return
    try:
        for method in options.methods:
            parse_method(method)
        spec = parse_network(options.network).spec(options.hosts, waits=False)
        for warning in busy_machine():
            console.log(warning)
        for workload in options.workloads:
            console.log(f"{workload} on {options.network}: {len(options.methods)} methods, {options.steps} steps of each")
            before = load()
            command = ["-m", "benchmarks.studies.threads", "--as-rank", "--workloads", workload, "--steps", str(options.steps)]
            row = lab_result(spec, [*command, "--methods", *options.methods], "threads") | {"network": options.network}
            save(options.save_to, row | conditions(options.methods, before, 0))
    except GossamerError as error:
        raise SystemExit(f"threads: {error}") from None


if __name__ == "__main__":
    main()
