"""Rows: results, one JSON object per line of a file that measuring adds to, and the Markdown tables made of them."""

import fcntl
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError

Record = dict[str, Any]


class Store:
    """Rows of a file of JSON lines: a newer row takes the place of an older one whose values of ``key`` are the same.

    Several processes may write to one file: each knows what was there when it began and what it has added itself, and
    leaves alone what others have added since.
    """

    def __init__(self, path: Path, key: Sequence[str], writes: bool = True) -> None:
        """``writes``: whether new rows are written down. Raises ConfigurationError that names a line which is no row."""
        self._path, self._key, self._writes = path, tuple(key), writes
        self.rows: list[Record] = self._read()

    def find(self, **known: Any) -> Record | None:
        """The first row with these values."""
        return next((row for row in self.rows if known.items() <= row.items()), None)

    def add(self, rows: Sequence[Record]) -> None:
        """Keep rows, and write them down: an interruption leaves the file as it was, or with all of them."""
        self.rows = self._merged(self.rows, rows)
        if self._writes and rows:
            with _alone(self._path):
                _write(self._path, self._merged(self._read(), rows))

    def _read(self) -> list[Record]:
        return read_rows(self._path)

    def _merged(self, before: Sequence[Record], rows: Sequence[Record]) -> list[Record]:
        return list({self._of(row): row for row in (*before, *rows)}.values())

    def _of(self, row: Record) -> str:
        return json.dumps([row.get(name) for name in self._key])


def read_rows(path: Path) -> list[Record]:
    """What a file of JSON lines has; nothing if it is not there. ConfigurationError that names a line which is no row."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _read(line: str, where: str) -> Record:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        row, wrong = None, error.msg
    else:
        wrong = "no JSON object"
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: not a whole row ({wrong}); delete the line, and what it held is measured anew")
    return row


def _write(path: Path, rows: Iterable[Record]) -> None:
    whole = path.with_suffix(".new")
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole.replace(path)


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Wait until no other process is in here with the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as file:
        with suppress(OSError):  # a file system that knows no locks
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the file, or the process
        yield


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table: its title, and what it shows of a row (empty where the row does not tell)."""

    title: str
    cell: Callable[[Record], str]


def table(columns: Sequence[Column], rows: Iterable[Record]) -> list[str]:
    """The lines of a Markdown table."""
    return markdown([column.title for column in columns], ([column.cell(row) for column in columns] for row in rows))


def markdown(head: Sequence[str], lines: Iterable[Sequence[str]]) -> list[str]:
    """The same of cells that are text already."""
    return [_line(head), "|" + "---|" * len(head), *map(_line, lines)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def text(name: str) -> Callable[[Record], str]:
    """A cell with a row's value of this name, as it is."""
    return lambda row: str(row.get(name, ""))


def code(name: str) -> Callable[[Record], str]:
    """A cell with a row's value of this name, as code."""
    return lambda row: f"`{row[name]}`"


def number(name: str, form: str = "{:.1f}", scale: float = 1.0) -> Callable[[Record], str]:
    """A cell with a number of a row, times ``scale``."""
    return lambda row: "" if row.get(name) is None else form.format(scale * row[name])


def milliseconds(name: str, form: str = "{:.1f}") -> Callable[[Record], str]:
    """A cell with the seconds of this name, in milliseconds."""
    return number(name, form, 1e3)


def day(when: float) -> str:
    """Of a time in seconds since 1970, in UTC."""
    return datetime.fromtimestamp(when, UTC).date().isoformat()


def days(rows: Iterable[Record]) -> str:
    """When rows were measured, as a sentence; empty where they do not tell."""
    known = sorted({day(row["when"]) for row in rows if "when" in row})
    return f"Measured on {known[0]}." if len(known) == 1 else f"Measured from {known[0]} to {known[-1]}." if known else ""
