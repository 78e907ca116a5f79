"""Report: the demo's table, on the terminal and as markdown, and its picture."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from benchmarks.demo.picture import Curve, Sooner, loss_over_time
from benchmarks.demo.run import WARM_UP, Run, exposed_seconds
from gossamer.bench.conditions import cores, processor

Figure = Callable[[Run], float | None]


@dataclass(frozen=True)
class Report:
    """The figures of ``runs``, the first of which is the reference; ``compute`` trained without communicating."""

    network: str
    compute: Run
    runs: Sequence[Run]
    notes: Sequence[str]

    @property
    def until(self) -> float:
        """The moment at which losses are compared: every run has got there."""
        return float(min(run.evaluations[-1]["seconds"] for run in self.runs))

    def rows(self) -> list[tuple[str, list[str]]]:
        """What is measured, and its value for every run."""
        reference, until = self.runs[0], self.until
        goal = reference.loss_at(until)
        figures: list[tuple[str, Figure, str]] = [
            ("step time", lambda run: _times(1e3, run.step_seconds), "{:.0f} ms"),
            ("tokens per second, all workers", lambda run: run.items_per_second, "{:,.0f}"),
            ("exposed communication per step", lambda run: _times(1e3, exposed_seconds(run, self.compute)), "{:.0f} ms"),
            ("payload per step and worker", lambda run: _times(1e-6, run.payload_per_step), "{:.2f} MB"),
            (
                "sent through the host's interface per step",
                lambda run: _times(1e-6, run.per_step("interface_bytes")),
                "{:.2f} MB",
            ),
            (f"steps in {until:.0f} s of training", lambda run: run.steps_by(until), "{:,.0f}"),
            (f"validation loss after {until:.0f} s", lambda run: run.loss_at(until), "{:.3f}"),
        ]
        if goal is not None:
            figures.append((f"time to validation loss {goal:.3f}", lambda run: run.time_to(goal), "{:.1f} s"))
        return [(name, [_spelled(figure(run), form) for run in self.runs]) for name, figure, form in figures]

    def explanations(self) -> list[str]:
        """What the reader has to know of how the figures came about."""
        compute = _spelled(_times(1e3, self.compute.step_seconds), "{:.0f} ms")
        lines = [
            f"Exposed communication: step time less {compute}, a step of the same workers without any communication, "
            "measured in the same run. The hosts share this machine's processors: what carrying the bytes and emulating "
            "the network costs there counts as exposed.",
            *self._stood_still(),
            *self._trained_with(),
            f"Means over all steps but the first {WARM_UP}; one run each, one seed. {machine(self.compute)}.",
        ]
        if any(run.name == "ddp" for run in self.runs):
            lines.insert(-1, "DDP with its defaults; its payload is computed, 2·(p - 1)/p of the gradients: a ring all-reduce.")
        return [*lines, *self.notes]

    def _stood_still(self) -> list[str]:
        waits = {run.title: run.per_step("exposed_seconds") for run in self.runs}
        told = [f"{1e3 * wait:.0f} ms per step with {title}" for title, wait in waits.items() if wait is not None]
        return [f"gossamer kept the training loop waiting for {', '.join(told)}."] if told else []

    def _trained_with(self) -> list[str]:
        """What differs between the runs beside the communication."""
        optimizers = {run.title: run.header["optimizer"] for run in self.runs if "optimizer" in run.header}
        if len(set(optimizers.values())) < 2:
            return []
        told = ", ".join(f"{title} with {optimizer}" for title, optimizer in optimizers.items())
        return [f"Trained: {told}. Where weights travel, the validation loss is that of the workers' average."]

    def table(self) -> Table:
        """For the terminal."""
        table = Table("", title=self.network, title_justify="left")
        for run in self.runs:
            table.add_column(run.title, justify="right")
        for name, values in self.rows():
            table.add_row(name, *values)
        return table

    def markdown(self) -> str:
        """For the README."""
        titles = [run.title for run in self.runs]
        lines = [
            f"{self.network[0].upper()}{self.network[1:]}:",
            "",
            _line(["", *titles]),
            _line(["---", *("---:" for _ in titles)]),
        ]
        lines += [_line([name, *values]) for name, values in self.rows()]
        return "\n".join([*lines, "", *(f"{text}\n" for text in self.explanations())])

    def draw(self, path: Path) -> None:
        """Save the picture of the validation losses."""
        until = self.until
        curves = [curve for run in self.runs if (curve := self._curve(run, until)).losses]
        loss_over_time(
            path, curves, title="Validation loss over wall-clock time", subtitle=self.network,
            footer=f"{machine(self.compute)}; one run each, one seed", until=until, sooner=self._sooner(),
        )  # fmt: skip

    def _curve(self, run: Run, until: float) -> Curve:
        points = [(e["seconds"], e["validation_loss"]) for e in run.evaluations if e["seconds"] < until]
        end = run.loss_at(until)
        points += [(until, end)] if end is not None else []
        return Curve(run.title, [x for x, _ in points], [y for _, y in points])

    def _sooner(self) -> Sooner | None:
        """The last run against the first: when each first had the loss that the first one ends with."""
        loss = self.runs[0].loss_at(self.until)
        if loss is None:
            return None
        late, early = self.runs[0].time_to(loss), self.runs[-1].time_to(loss)
        return None if late is None or early is None or early >= late else Sooner(loss, early, late)


def machine(run: Run) -> str:
    """The machine, in words."""
    return f"{cores()} cores of {processor()}; Python {platform.python_version()}, PyTorch {run.header['torch']}"


def _times(factor: float, value: float | None) -> float | None:
    return None if value is None else factor * value


def _spelled(value: float | None, form: str) -> str:
    return "not measured" if value is None else form.format(value)


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
