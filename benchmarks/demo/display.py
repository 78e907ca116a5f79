"""Live display: the demo's runs as a table that grows while they train, or as plain lines where there is no terminal."""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from benchmarks.demo.run import Run, exposed_seconds

# Drawing takes processor time from the training: seldom enough not to show in its figures.
_REFRESH = 0.5
_PLAIN_LINE = 10.0


class Display:
    """Shows the progress of ``runs``, the first of which is the one that computes without communicating."""

    def __init__(self, console: Console, heading: str, runs: Sequence[Run]) -> None:
        self._console, self._heading, self._runs = console, heading, runs
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._shown, self._states = 0.0, [""] * len(runs)

    def __enter__(self) -> "Display":
        if self._live is None:
            self._console.print(self._heading)
        else:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
            self._live.stop()

    def show(self, runs: Sequence[Run]) -> None:
        """Show these runs from now on; as many as before."""
        self._runs = runs

    def refresh(self) -> None:
        """Draw anew if enough time has passed since the last time, or if a run has begun or ended."""
        states = [run.state for run in self._runs]
        changed = states != self._states
        interval = _PLAIN_LINE if self._live is None else _REFRESH
        if not changed and time.monotonic() - self._shown < interval:
            return
        self._shown = time.monotonic()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        else:
            self._print_lines(states)
        self._states = states

    def _print_lines(self, states: Sequence[str]) -> None:
        for run, before, state in zip(self._runs, self._states, states, strict=True):
            if state != before and state != "waiting":
                self._console.print(f"{run.title}: {state}", highlight=False, soft_wrap=True)
            elif state == "training":
                figures = ", ".join(f"{name} {value}" for name, value in self._figures(run).items() if value)
                self._console.print(f"{run.title}: {figures}", highlight=False, soft_wrap=True)

    def _table(self) -> Table:
        table = Table(title=self._heading, title_justify="left", expand=True)
        table.add_column("", no_wrap=True)
        table.add_column("progress", min_width=12)
        for name in self._figures(self._runs[0]):
            table.add_column(name, justify="right")
        for run in self._runs:
            progress = ProgressBar(total=1.0, completed=run.progress, complete_style="cyan") if run.steps else run.state
            table.add_row(run.title, progress, *self._figures(run).values())
        return table

    def _figures(self, run: Run) -> dict[str, str]:
        compute = self._runs[0]
        exposed = exposed_seconds(run, compute) if run is not compute and compute.state == "done" else None
        sent = run.per_step("interface_bytes") if run.header else None
        sent = run.payload_per_step if sent is None and run.header else sent
        return {
            "training time": f"{run.seconds:.0f} s" if run.steps else "",
            "step": str(len(run.steps)) if run.steps else "",
            "loss": f"{run.steps[-1]['loss']:.3f}" if run.steps else "",
            "validation": f"{run.evaluations[-1]['validation_loss']:.3f}" if run.evaluations else "",
            "ms per step": f"{1e3 * run.step_seconds:.0f}" if run.step_seconds is not None else "",
            "MB per step": f"{sent / 1e6:.2f}" if sent is not None else "",
            "exposed ms": f"{1e3 * exposed:.0f}" if exposed is not None else "",
        }
