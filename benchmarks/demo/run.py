"""Training run: one way to communicate, trained on the emulated hosts, and what its log says."""

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gossamer.errors import GossamerError
from gossamer.lab import LabResult, LabSpec, run_lab

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "01_gpt.py"

WARM_UP = 5
"""Steps left out of the means: buckets are still being laid out, caches and queues are cold."""

Record = dict[str, Any]


class DemoError(GossamerError):
    """The demo cannot go on; the message is for the user."""


@dataclass
class Run:
    """What one training run has written so far: a header, then steps and evaluations, each with cumulative counters."""

    name: str
    title: str
    arguments: tuple[str, ...]
    goal_steps: int
    goal_seconds: float = math.inf
    header: Record = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    evaluations: list[Record] = field(default_factory=list)
    state: str = "waiting"
    lines: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Take in one line of the script's log."""
        record = json.loads(line)
        self.lines.append(line)
        if "algorithm" in record:
            self.header = record
        else:
            self.state = "training"
            (self.evaluations if "validation_loss" in record else self.steps).append(record)

    @property
    def seconds(self) -> float:
        """Training time so far."""
        last = [records[-1]["seconds"] for records in (self.steps, self.evaluations) if records]
        return float(max(last, default=0.0))

    @property
    def progress(self) -> float:
        """How much of the run is done, from 0 to 1."""
        return (
            1.0 if self.state == "done" else min(1.0, max(len(self.steps) / self.goal_steps, self.seconds / self.goal_seconds))
        )

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step after the warm-up, the waiting for each other before evaluations included."""
        counted = len(self.steps) - WARM_UP
        return (self.seconds - float(self.steps[WARM_UP - 1]["seconds"])) / counted if counted > 0 else None

    @property
    def items_per_second(self) -> float | None:
        """Tokens of all workers together, by the same clock."""
        if self.step_seconds is None:
            return None
        return float(self.steps[-1]["items"]) / len(self.steps) / self.step_seconds

    def per_step(self, counter: str) -> float | None:
        """Mean growth of a counter from step to step; None if the log has no such counter.

        Steps before and after an evaluation are not compared, because messages end their way while the clock stands.
        """
        grown, counted = 0.0, 0
        evaluated_after = {evaluation["step"] for evaluation in self.evaluations}
        for before, after in itertools.pairwise(self.steps):
            if counter not in after:
                return None
            if after["step"] - 1 not in evaluated_after:
                grown, counted = grown + after[counter] - before[counter], counted + 1
        return grown / counted if counted else None

    @property
    def payload_per_step(self) -> float | None:
        """Bytes that a worker handed to the transport per step: exact at evaluations, where nothing is under way."""
        if not self.evaluations:
            return self.per_step("payload_bytes")
        return float(self.evaluations[-1]["payload_bytes"] / self.evaluations[-1]["step"])

    def steps_by(self, seconds: float) -> int:
        """Number of steps done at a moment of training time."""
        return sum(step["seconds"] <= seconds for step in self.steps)

    def loss_at(self, seconds: float) -> float | None:
        """Validation loss at a moment of training time, on the straight line between two evaluations."""
        for before, after in itertools.pairwise(self.evaluations):
            if before["seconds"] <= seconds <= after["seconds"]:
                return _between(seconds, before, after, "seconds", "validation_loss")
        last = self.evaluations[-1]
        return float(last["validation_loss"]) if last["seconds"] == seconds else None

    def time_to(self, loss: float) -> float | None:
        """Training time at which the validation loss first is as low as ``loss``."""
        for before, after in itertools.pairwise(self.evaluations):
            if after["validation_loss"] <= loss <= before["validation_loss"]:
                return _between(loss, before, after, "validation_loss", "seconds")
        return None


def _between(x: float, before: Record, after: Record, horizontal: str, vertical: str) -> float:
    x0, x1, y0, y1 = before[horizontal], after[horizontal], before[vertical], after[vertical]
    return float(y0 if x0 == x1 else y0 + (x - x0) / (x1 - x0) * (y1 - y0))


def exposed_seconds(run: Run, compute: Run) -> float | None:
    """Communication that a step does not hide: its time beyond that of the same workers who do not communicate."""
    if run.step_seconds is None or compute.step_seconds is None:
        return None
    return max(0.0, run.step_seconds - compute.step_seconds)


def train(run: Run, spec: LabSpec, on_progress: Callable[[], None]) -> LabResult:
    """Train on the emulated hosts, calling ``on_progress`` after every line of the log. Raises if a rank fails."""

    def on_line(rank: int, stream: str, line: str) -> None:
        if rank == 0 and stream == "stdout" and line.startswith("{"):
            run.add(line)
            on_progress()

    run.state = "starting"
    on_progress()
    result = run_lab(spec, [str(SCRIPT), *run.arguments, "--log-to", "-"], on_line=on_line)
    if result.exit_code != 0:
        run.state = "failed"
        raise DemoError(failure(run, result))
    run.state = "done"
    on_progress()
    return result


def failure(run: Run, result: LabResult) -> str:
    """What a run that failed is reported as."""
    if result.timed_out:
        return f"{run.title}: not done in time; the run was ended at step {len(run.steps)}"
    where = f"rank {result.failed_rank} on host {result.failed_host} failed with exit code {result.exit_code}"
    return f"{run.title}: {where}, after {len(run.steps)} steps of rank 0\n{result.traceback}".rstrip()


def save_logs(runs: Sequence[Run], folder: Path) -> None:
    """Write every run's log as it came, in the place of those of an earlier demo."""
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob("[0-9]-*.jsonl"):
        earlier.unlink()
    for number, run in enumerate(runs):
        (folder / f"{number}-{run.name}.jsonl").write_text("\n".join(run.lines) + "\n")
