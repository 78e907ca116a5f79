"""In the lab: run a measuring script on emulated hosts and collect the JSON objects that it prints."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from gossamer.errors import GossamerError
from gossamer.lab import LabSpec, run_lab

Record = dict[str, Any]


def lab_json(spec: LabSpec, command: Sequence[str], on_record: Callable[[Record], None] | None = None) -> list[Record]:
    """The JSON objects that ``command`` printed on the hosts of ``spec``, each given to ``on_record`` as it comes.

    Raises GossamerError, with the last lines of output, if it failed.
    """
    found: list[Record] = []
    other: list[str] = []

    def keep(rank: int, stream: str, line: str) -> None:
        try:
            record = json.loads(line) if line.startswith("{") else None
        except json.JSONDecodeError:
            record = None
        if record is None:
            other.append(line)
            return
        found.append(record)
        if on_record is not None:
            on_record(record)

    result = run_lab(spec, list(command), on_line=keep)
    if result.exit_code != 0:
        raise GossamerError(
            f"{' '.join(command)} failed on {spec.rate} with code {result.exit_code}:\n" + "\n".join(other[-20:])
        )
    return found
