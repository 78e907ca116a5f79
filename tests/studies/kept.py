"""What a study keeps of its rows, and the table that it makes of them."""

from pathlib import Path
from typing import Any

from benchmarks.studies import convergence
from gossamer.bench.rows import Store


def run_all(workload: Any, runs: Any, log: Path, train: Any = convergence.train, of_file: str | None = None) -> list[Any]:
    """Train what the file does not have, keep it there, and give all that it has then."""
    store = Store(log, convergence.KEY)
    for row in convergence.run_all(workload, runs, store, train, of_file):
        store.add([row])
    return store.rows


def table(rows: list[Any]) -> list[str]:
    """The table of a convergence study, as lines."""
    return convergence.STUDY.page(rows).splitlines()
