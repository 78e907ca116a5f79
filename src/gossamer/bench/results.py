"""Results: the rows of ``gossamer bench``, one per case and method: what has been measured already, and what is lacking."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gossamer.bench.cases import Case, Turns, case_of, is_measured
from gossamer.bench.catalogue import canonical_workload, digest, is_of
from gossamer.bench.rows import Record, Store, read_rows
from gossamer.spelled import canonical


class Results(Store):
    """Rows of a file: what could not run, or failed, does not take the place of what was measured."""

    def __init__(self, path: Path, writes: bool = True) -> None:
        super().__init__(path, ("workload", "network", "hosts", "method"), writes)

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

    def _of_case(self, case: Case) -> list[Record]:
        return [row for row in self._of_file(case.workload) if case_of(row) == case]

    def _of_file(self, workload: str) -> list[Record]:
        """Rows that are not of another version of this workload's file."""
        of_file = digest(workload)
        return [row for row in self.rows if is_of(row, of_file)]

    def _read(self) -> list[Record]:
        """Methods and workloads spelled as they are compared."""
        return [
            row | {"method": canonical(row["method"]), "workload": canonical_workload(row["workload"])}
            if {"method", "workload"} <= row.keys() else row
            for row in read_rows(self._path)
        ]  # fmt: skip

    def _merged(self, before: Sequence[Record], rows: Sequence[Record]) -> list[Record]:
        measured = {self._of(row) for row in before if is_measured(row)}
        return super()._merged(before, [row for row in rows if is_measured(row) or self._of(row) not in measured])


def _turns(row: Record) -> Turns:
    """How a row was measured. Old ones do not tell how warm it was."""
    return Turns(row["rounds"], row.get("steps_per_round", 0), row.get("warmup", 0))
