"""Cut: what a step would gain if tensors larger than a bucket were cut over several, predicted on the shipped clusters.

python -m benchmarks.studies.cut

A gradient is one tensor in one bucket, however large: VGG-16 has one of 411 MB among 553. Beside it the same model is predicted
with every such tensor in slices of a bucket each, which are there when the whole one is, and so travel, and are encoded and
decoded, one after the other. ``ScatterReduce`` cuts long buckets within its exchange already. Beside the shipped clusters four
hosts at 1 Gbit/s, whose processor is that of ``benchmarks/results/foresight.md``.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from statistics import median

import torch
from torch import nn
from torch.nn import Parameter

from benchmarks.studies.foresight import calibrated
from benchmarks.studies.harness import Study, console, parser_of
from gossamer.bench.methods import algorithm_of, overlaps_forward, parse_method
from gossamer.bench.rows import Column, Record, Store, code, number, text
from gossamer.simulate import Cluster, Compute, Link, Machines, step_time
from gossamer.simulate.cluster_file import find_cluster, shipped
from gossamer.simulate.named import find_task
from gossamer.simulate.task import Task, device_of

MODELS = ("vgg16",)
METHODS = (
    "AllReduce()", "overlap_forward(AllReduce())", "AllReduce(wire='bf16')", "ScatterReduce()", "ChunkSparse()",
    "QuantizedGossip()", "Hierarchical(AllReduce())",
)  # fmt: skip
HOSTS = "4 hosts, 1 Gbit/s, processors"


def cluster_of(name: str) -> Cluster:
    """A shipped one, or the hosts."""
    if name != HOSTS:
        return find_cluster(name)
    processor = replace(calibrated(), cores=1, computes=False)
    return Cluster(name=HOSTS, machines=Machines(count=4), between=Link(bandwidth=1e9, latency=1e-4), processor=processor)


@cache
def task_of(name: str) -> Task:
    """A shipped model with its usual batch."""
    return find_task(name, None, "fp32")


def in_slices(model: nn.Module, compute: Compute, most: float) -> tuple[nn.Module, Compute]:
    """The parameters of a model in slices of at most ``most`` bytes, each there, and needed, when the whole one is."""
    made, ready, needed = nn.Module(), {}, {}
    for name, parameter in model.named_parameters():
        rows = max(1, len(parameter) // max(1, math.ceil(parameter.nbytes / most)))
        for place, part in enumerate(parameter.detach().split(rows)):
            own = f"{name}_{place}".replace(".", "_")
            made.register_parameter(own, Parameter(torch.empty_like(part, device="meta")))
            ready[own], needed[own] = compute.ready.get(name, compute.backward), compute.needed.get(name, 0.0)
    return made, replace(compute, ready=ready, needed=needed)


def measure(options: object, store: Store) -> Iterator[Record]:
    """Predict what is not there yet."""
    for model in MODELS:
        for cluster in (HOSTS, *shipped()):
            found, task = cluster_of(cluster), task_of(model)
            compute = task.compute(
                0.3 if cluster == HOSTS else None, "" if cluster == HOSTS else device_of(found, None), "fp32"
            )
            for method in METHODS:
                known = store.find(cluster=cluster, model=model, method=method)
                if known is not None or ("Hierarchical" in method and found.machines.devices == 1):
                    continue
                console.log(f"{model} on {cluster}, {method}")
                parsed = parse_method(method)
                algorithm = algorithm_of(parsed)
                assert algorithm is not None
                seconds = []
                for most in (math.inf, algorithm.bucket_bytes):
                    cut, profile = in_slices(task.model, compute, most)
                    predicted = step_time(
                        cut, algorithm, cluster=found, compute=profile, overlap_forward=overlaps_forward(parsed)
                    )
                    seconds.append(predicted.step_seconds)
                yield {
                    "cluster": cluster, "model": model, "method": method, "compute_seconds": compute.seconds,
                    "whole_seconds": seconds[0], "cut_seconds": seconds[1],
                }  # fmt: skip


def gain(row: Record) -> float:
    """The share of a step that would be gained."""
    return float(1 - row["cut_seconds"] / row["whole_seconds"])


def counted(rows: Sequence[Record]) -> str:
    """The median and the largest gain of each model."""
    told = []
    for model in dict.fromkeys(row["model"] for row in rows):
        own = sorted((row for row in rows if row["model"] == model), key=gain)
        told.append(
            f"{model}: {100 * median(map(gain, own)):.1f} % in the median, at most {100 * gain(own[-1]):.1f} % "
            f"(`{own[-1]['method']}`, {own[-1]['cluster']}), at least {100 * gain(own[0]):.1f} % (`{own[0]['method']}`, "
            f"{own[0]['cluster']})"
        )
    return "Of a step would be gained: " + "; ".join(told) + "."


COLUMNS = (
    Column("cluster", text("cluster")),
    Column("model", text("model")),
    Column("method", code("method")),
    Column("compute, ms", number("compute_seconds", "{:.0f}", 1e3)),
    Column("step, ms", number("whole_seconds", "{:.0f}", 1e3)),
    Column("step, tensors cut, ms", number("cut_seconds", "{:.0f}", 1e3)),
    Column("gain", lambda row: f"{100 * gain(row):+.1f} %"),
)

STUDY = Study("cut", ("cluster", "model", "method"), lambda rows: COLUMNS, note=counted)


if __name__ == "__main__":
    STUDY.main(parser_of(__doc__), measure)
