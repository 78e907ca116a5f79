"""Results: the rows of a file, one per case and method: what has been measured already, and what is lacking."""

import fcntl
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from gossamer.bench.catalogue import canonical_workload, digest, is_of
from gossamer.bench.in_lab import Record
from gossamer.bench.matrix import Case, Turns, case_of, is_measured
from gossamer.bench.memory import FIGURES
from gossamer.bench.rows import read_rows, write_rows
from gossamer.bench.spelled import canonical


class Results:
    """Rows of a file of JSON lines: one per case and method. ``writes``: whether new ones are written down.

    Several processes may write to one file: each knows what was there when it began, and what it has measured itself, and
    leaves alone what others have added since.
    """

    def __init__(self, path: Path, writes: bool = True) -> None:
        self._path, self._writes = path, writes
        self.rows: list[Record] = _read(path)

    def there(self, case: Case, turns: Turns) -> dict[str, Record]:
        """What has been measured in this case, by method; not in fewer rounds, with fewer steps, less warm, or when the
        workload's file was another one."""
        return {row["method"]: row for row in self._of_case(case) if is_measured(row) and _turns(row).cover(turns)}

    def lacking(self, case: Case, methods: Iterable[str], turns: Turns) -> list[str]:
        """Those of ``methods`` that are not :meth:`there`."""
        there = self.there(case, turns)
        return [method for method in methods if method not in there]

    def failed(self, case: Case) -> set[str]:
        """Methods whose last measurement failed."""
        return {row["method"] for row in self._of_case(case) if "failed" in row}

    def memory(self, case: Case) -> dict[str, Record]:
        """What methods need of memory with this workload and number of hosts, on whichever network it was measured."""
        rows = self._of_file(case.workload)
        same = [row for row in rows if (row["workload"], row["hosts"]) == (case.workload, case.hosts)]
        return {row["method"]: {name: row[name] for name in FIGURES} for row in same if FIGURES[0] in row}

    def _of_case(self, case: Case) -> list[Record]:
        return [row for row in self._of_file(case.workload) if case_of(row) == case]

    def _of_file(self, workload: str) -> list[Record]:
        """Rows that are not of another version of this workload's file."""
        of_file = digest(workload)
        return [row for row in self.rows if is_of(row, of_file)]

    def add(self, rows: Sequence[Record]) -> None:
        """Keep rows, in place of older ones of the same case and method, and write them down.

        What could not run, or failed, does not take the place of what was measured.
        """
        self.rows = _with(self.rows, rows)
        if self._writes and rows:
            with _alone(self._path):
                write_rows(self._path, _with(_read(self._path), rows))


def _read(path: Path) -> list[Record]:
    """Rows of a file, methods and workloads spelled as they are compared."""
    return [
        row | {"method": canonical(row["method"]), "workload": canonical_workload(row["workload"])}
        if {"method", "workload"} <= row.keys() else row
        for row in read_rows(path)
    ]  # fmt: skip


def _with(before: Sequence[Record], rows: Sequence[Record]) -> list[Record]:
    measured = {_key(row) for row in before if is_measured(row)}
    rows = [row for row in rows if is_measured(row) or _key(row) not in measured]
    fresh = {_key(row) for row in rows}
    return [row for row in before if _key(row) not in fresh] + rows


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        with suppress(OSError):  # a file system that knows no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file, or the process
        yield


def _turns(row: Record) -> Turns:
    """How a row was measured. Old ones do not tell how warm it was."""
    return Turns(row["rounds"], row.get("steps_per_round", 0), row.get("warmup", 0))


def _key(row: Record) -> tuple[Any, ...]:
    return case_of(row), row["method"]
