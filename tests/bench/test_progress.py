"""What is seen while gossamer bench measures."""

import io
import re
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from gossamer.bench import command, suites
from gossamer.bench.cases import Case
from gossamer.bench.results import Results
from gossamer.bench.session import Place, Session

from .test_cases import a_row


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


def test_the_bar_of_a_case_moves_with_its_rounds_and_results_are_told_as_they_come(
    tmp_path: Path,
) -> None:
    console, case = a_console(terminal=True), Case("Convnet(0.05)", "200mbit", 4)
    columns = command._progress().columns
    progress = Progress(*columns, console=console, auto_refresh=False)
    seen = []

    def measure(case, methods, turns, on_record):
        for number in range(turns.rounds):
            on_record({"method": methods[0]})  # not of a round's end
            on_record({"round": number + 1})
            (task,) = progress.tasks
            seen.append((task.description, task.completed, task.total))
        progress.refresh()
        return [a_row(method, workload=case.workload, network=case.network, hosts=case.hosts) for method in methods]

    place = Place(dict, list, lambda case, methods: [], measure, separate=True)
    with progress:
        wanted = suites.Run((case.workload,), methods=("Gossip()",), rounds=2, steps=1, warmup=1)
        Session(place, wanted, Results(tmp_path / "r.jsonl"), progress).run([case])
    described = f"{case}: 3 methods"  # DDP and computing alone go along
    assert seen == [(described, 1, 2), (described, 2, 2)]
    assert not progress.tasks
    text = written(console)
    assert described in text
    assert re.search(rf"{re.escape(str(case))}: Gossip\(\) .* of DDP", text)
