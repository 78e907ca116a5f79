"""Switched: a replica with ``switch=True`` in the lab, whose links drop from 1 Gbit/s to 50 Mbit/s in mid-run.

A small network learns what another one says. Each step also waits, as if it computed. Told are the method of every
step, what it took, and the loss, in three runs: the method must follow within 50 steps, and the loss must go on.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import SGD

import gossamer
from benchmarks.studies.harness import AS_RANK, Study, console, measured_on, parser_of
from gossamer.bench.conditions import conditions, load
from gossamer.bench.in_lab import lab_json
from gossamer.bench.rows import Column, Record, Store
from gossamer.lab import LabSpec

HOSTS, BEFORE, AFTER = 4, "1gbit", "50mbit"
STEPS, MORE = 40, 60
"""Steps before the rate drops, and after it."""

COMPUTE = 0.15
SIGN = "the rate drops now"


class _Wait(torch.autograd.Function):
    """Passes its input on; forward and backward take a while."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        time.sleep(COMPUTE / 3)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        time.sleep(2 * COMPUTE / 3)
        return gradients[0]


class Network(nn.Module):
    """Two wide layers (0.5 million parameters) behind a small one, before which backward waits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(32, 128), nn.Linear(128, 2048), nn.Linear(2048, 128)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden: Tensor = _Wait.apply(torch.tanh(self.first(inputs)))  # type: ignore[no-untyped-call]
        outputs: Tensor = self.last(torch.relu(self.wide(hidden)))
        return outputs


def trained() -> Iterator[Record]:
    """On a rank: every step's method, seconds and loss."""
    torch.manual_seed(0)
    model, teacher = Network(), nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 128)).requires_grad_(False)
    optimizer = SGD(model.parameters(), lr=0.02, momentum=0.9)
    replica = gossamer.replicate(model, optimizer, fidelity="close", switch=True)
    generator = torch.Generator().manual_seed(dist.get_rank())
    steps: list[Record] = []
    for number in range(STEPS + MORE):
        if number == STEPS:
            dist.barrier()
            if dist.get_rank() == 0:
                sys.stdout.write(f"{SIGN}\n")
                sys.stdout.flush()
            time.sleep(1.0)
        begin, method = time.perf_counter(), repr(replica.algorithm)
        inputs = torch.randn(64, 32, generator=generator)
        optimizer.zero_grad()
        loss = (model(inputs) - teacher(inputs)).square().mean()
        loss.backward()
        optimizer.step()
        steps.append({"method": method, "seconds": time.perf_counter() - begin, "loss": float(loss)})
    replica.close()
    yield {"steps": steps}


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """The runs that are not there yet."""
    for run in range(options.runs):
        own = {"before": BEFORE, "after": AFTER, "run": run}
        if store.find(**own) is not None:
            continue
        load_before = load()
        console.log(f"{HOSTS} hosts, {BEFORE}, then {AFTER}, run {run}")
        faults = [f"throttle {host} {AFTER} @line:{SIGN}" for host in range(HOSTS)]
        spec = LabSpec(hosts=HOSTS, rate=BEFORE, faults=faults)
        found = lab_json(spec, ["-m", "benchmarks.studies.switched", AS_RANK])[-1]
        yield own | found | conditions([], load_before, {})


def spans(rows: Sequence[Record]) -> list[Record]:
    """Steps of a run that follow each other with the same method at the same rate, together."""
    found: list[Record] = []
    for row in rows:
        for number, step in enumerate(row["steps"]):
            same = {"run": row["run"], "rate": row["before"] if number < STEPS else row["after"], "method": step["method"]}
            if not found or any(found[-1][name] != value for name, value in same.items()):
                found.append(same | {"first": number + 1, "steps": []})
            found[-1]["steps"].append(step)
    return found


def followed(rows: Sequence[Record]) -> str:
    """After how many steps the method changed, how much faster the last steps are than those before it, and the losses."""
    after, gains, losses = [], [], []
    for row in rows:
        steps = row["steps"]
        first = next(
            (number for number in range(STEPS, len(steps)) if steps[number]["method"] != steps[STEPS - 1]["method"]), None
        )
        after.append("never" if first is None else str(first - STEPS))
        slow, fast = (median(step["seconds"] for step in part) for part in (steps[STEPS : STEPS + 20], steps[-10:]))
        gains.append(f"{slow / fast:.2f}")
        parts = steps[:10], steps[STEPS - 10 : STEPS], steps[-10:]
        losses.append(" to ".join(f"{sum(step['loss'] for step in part) / len(part):.3f}" for part in parts))
    return (
        f"Steps from the drop to another method: {', '.join(after)}. The last ten steps are {', '.join(gains)} times as "
        "fast as those right after the drop. Mean loss of the first ten steps, of the ten before the drop, and of the last "
        f"ten: {'; '.join(losses)}. {measured_on(rows)}"
    )


def _median(row: Record) -> float:
    return float(median(step["seconds"] for step in row["steps"]))


COLUMNS = (
    Column("run", lambda row: str(row["run"])),
    Column("rate", lambda row: row["rate"]),
    Column("method", lambda row: f"`{row['method']}`"),
    Column("steps", lambda row: f"{row['first']} to {row['first'] + len(row['steps']) - 1}"),
    Column("median step, ms", lambda row: f"{1e3 * _median(row):.0f}"),
    Column("loss of the last", lambda row: f"{row['steps'][-1]['loss']:.4f}"),
)

STUDY = Study("switched", ("before", "after", "run"), lambda rows: COLUMNS, spans, followed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; as a rank of the lab, print what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--runs", type=int, default=3)
    STUDY.main(parser, measure, arguments, lambda options: trained())


if __name__ == "__main__":
    main()
