"""Rows: results, one per line of a file, and the Markdown tables made of them."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gossamer.errors import ConfigurationError


def read_rows(path: Path) -> list[dict[str, Any]]:
    """What a file of JSON lines has; nothing if it is not there. ConfigurationError that names a line which is no row."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [_read(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _read(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        row, wrong = None, error.msg
    else:
        wrong = "no JSON object"
    if not isinstance(row, dict):
        raise ConfigurationError(f"{where}: not a whole row ({wrong}); delete the line, and what it held is measured anew")
    return row


def write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write all ``rows`` in place of what the file had; whoever interrupts this leaves one or the other, whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.with_suffix(".new")
    whole.write_text("".join(json.dumps(row) + "\n" for row in rows))
    whole.replace(path)


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Write one more; several processes may do so at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(row) + "\n")


def merged(before: Sequence[dict[str, Any]], now: Sequence[dict[str, Any]], key: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of both, in the order of the first time that each was measured; the newer one where both have it."""
    rows = {tuple(row[name] for name in key): row for row in (*before, *now)}
    return list(rows.values())


def day(when: float) -> str:
    """Of a time in seconds since 1970, in UTC."""
    return datetime.fromtimestamp(when, UTC).date().isoformat()


def days(rows: Iterable[dict[str, Any]]) -> str:
    """When rows were measured, as a sentence; empty where they do not tell."""
    known = sorted({day(row["when"]) for row in rows if "when" in row})
    return f"Measured on {known[0]}." if len(known) == 1 else f"Measured from {known[0]} to {known[-1]}." if known else ""


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    return [_line(head), "|" + "---|" * len(head), *map(_line, rows)]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
