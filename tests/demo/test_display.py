"""What is seen while one waits: the demo's table, in a terminal and without one."""

import io
import re

import pytest
from rich.console import Console

from benchmarks.demo import display as demo_display
from benchmarks.demo.display import Display
from benchmarks.demo.run import Run

from .test_demo import a_run


def a_console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=140, color_system=None)


def written(console: Console) -> str:
    """What is written since the last time, without the movements of the cursor."""
    file = console.file
    assert isinstance(file, io.StringIO)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    file.seek(0)
    file.truncate()
    return text


def line_of(text: str, title: str) -> str:
    """The last line that tells of a run."""
    return [line for line in text.splitlines() if line.strip(" │┃").startswith(title)][-1]


@pytest.fixture
def runs() -> list[Run]:
    compute = a_run("compute", 0.1, 40, payload_bytes=0.0)
    compute.state = "done"
    return [compute, a_run("DDP", 0.4, 40, payload_bytes=6e6), Run("ours", "ours", (), 40)]


def test_a_terminal_shows_every_run_with_its_figures_as_they_come(runs: list[Run]) -> None:
    console = a_console(terminal=True)
    with Display(console, "four hosts", runs) as display:
        display.refresh()
        text = written(console)
        assert "four hosts" in text
        # seconds, steps, training and validation loss, ms and MB per step, exposed ms
        assert re.findall(r"\d[\d.]*", line_of(text, "DDP")) == ["16", "40", "1.000", "6.000", "400", "6.00", "300"]
        assert "waiting" in line_of(text, "ours")
        runs[2].state = "training"
        display.refresh()
        assert "training" in line_of(written(console), "ours")
    assert "DDP" in written(console)  # what was seen last stays


def test_it_is_drawn_no_more_often_than_told_unless_a_run_begins_or_ends(
    runs: list[Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(demo_display.time, "monotonic", lambda: now)
    console = a_console(terminal=True)
    with Display(console, "four hosts", runs) as display:
        display.refresh()
        written(console)
        display.refresh()
        assert not written(console)
        now += demo_display._REFRESH
        display.refresh()
        assert "DDP" in written(console)
        runs[1].state = "done"
        display.refresh()
        assert "DDP" in written(console)


def test_without_a_terminal_it_is_lines_of_what_changes(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(demo_display.time, "monotonic", lambda: now)
    console = a_console(terminal=False)
    with Display(console, "four hosts", runs) as display:
        runs[1].state = "training"
        display.refresh()
        assert written(console).splitlines() == ["four hosts", "compute: done", "DDP: training"]
        now += demo_display._PLAIN_LINE
        display.refresh()
        (line,) = written(console).splitlines()  # of what is being trained only
        assert line.startswith("DDP: training time 16 s, step 40, loss 1.000")
