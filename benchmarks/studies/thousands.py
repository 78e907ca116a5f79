"""Thousands: what it takes to predict a step of shipped models among 4,096 workers, and of gossip among 100,000 unequal ones.

python -m benchmarks.studies.thousands --models resnet50 gpt2

Processor time of one thread, once a model is loaded and its arithmetic counted, and the most memory that the process had until
then. Among 100,000 workers every step is drawn anew for each, and carried out by all, 1,000 times.
"""

import argparse
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch

from benchmarks.studies.harness import Study, console, measured_on, parser_of
from gossamer.bench.conditions import conditions, load
from gossamer.bench.rows import Column, Record, Store, code, number, text
from gossamer.simulate import Cluster, Compute, Link, Machines, StepTime, Stragglers, step_time
from gossamer.simulate.counted import as_mean, count_step
from gossamer.simulate.models import MODELS
from gossamer.spelled import algorithm_of

WORKERS = 4096
METHODS = (
    "AllReduce()", "AllReduce(wire='bf16')", "ScatterReduce()", "ByteGrad()", "QSGD()", "ChunkSparse()", "PowerSGD()",
    "Gossip()", "GossipGraD()", "QuantizedGossip()", "DecentralizedSGD()", "LowPrecisionDecentralized()", "GossipPGA()",
    "PushSum()", "LocalSGD()", "DiLoCo()", "in_parts(8, Gossip())",
)  # fmt: skip
SMALL = "1 million parameters"
MANY, STEPS = 100_000, 1_000
LINK = Link(bandwidth=25e9, latency=5e-5)


def timed(predict: Callable[[], StepTime]) -> Record:
    """A prediction, and what it took."""
    begin = time.process_time()
    found = predict()
    seconds = time.process_time() - begin
    return {
        "step_seconds": found.step_seconds,
        "seconds": seconds,
        "memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def gossip() -> StepTime:
    """Of a small model: what workers cost does not depend on it."""
    model = torch.nn.Linear(1024, 1024, device="meta")
    cluster = Cluster(machines=Machines(count=MANY), between=LINK, stragglers=Stragglers(jitter=0.05, steps=STEPS))
    return step_time(model, algorithm_of("Gossip()"), cluster=cluster, compute=Compute(forward=0.03, backward=0.06))


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """What is not there yet of gossip among very many, then of every model with every method."""
    torch.set_num_threads(1)
    told = conditions([], load(), {})
    console.log(f"{MANY} workers")
    if store.find(model=SMALL, method="Gossip()", workers=MANY) is None:
        yield {"model": SMALL, "method": "Gossip()", "workers": MANY} | timed(gossip) | told
    for name in options.models:
        known = MODELS[name]
        model = known.model()
        compute = count_step(model, (known.inputs(known.batch),), as_mean).compute(0.1)
        for method in METHODS:
            if store.find(model=name, method=method, workers=WORKERS) is not None:
                continue
            console.log(f"{name}, {method}")
            predict = partial(
                step_time, model, algorithm_of(method), world=WORKERS, link=LINK, compute=compute, buffers="local"
            )
            yield {"model": name, "method": method, "workers": WORKERS} | timed(predict) | told


def longest(rows: Sequence[Record]) -> str:
    """The worst of them."""
    own = [row for row in rows if row["workers"] == WORKERS]
    if not own:
        return measured_on(rows)
    worst = max(own, key=lambda row: row["seconds"])
    return (
        f"Among {WORKERS:,} workers at most {worst['seconds']:.2f} s ({worst['model']}, `{worst['method']}`); within 2 s "
        f"{sum(row['seconds'] <= 2 for row in own)} of {len(own)}. {measured_on(rows)}"
    )


COLUMNS = (
    Column("model", text("model")),
    Column("method", code("method")),
    Column("workers", lambda row: f"{row['workers']:,}"),
    Column("predicted step, ms", number("step_seconds", "{:.1f}", 1e3)),
    Column("processor time of the prediction, s", number("seconds", "{:.2f}")),
    Column("memory, MiB", number("memory", "{:.0f}", 2**-20)),
)

STUDY = Study("thousands", ("model", "method", "workers"), lambda rows: COLUMNS, note=longest)


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict, and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    STUDY.main(parser, measure, arguments)


if __name__ == "__main__":
    main()
