"""In the lab: run a measuring script on emulated hosts and collect the JSON objects that it prints."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from gossamer.bench.rows import Record
from gossamer.errors import GossamerError
from gossamer.lab import LabSpec, run_lab


def lab_json(spec: LabSpec, command: Sequence[str], on_record: Callable[[Record], None] | None = None) -> list[Record]:
    """The JSON objects that ``command`` printed on the hosts of ``spec``, each given to ``on_record`` as it comes.

    Raises GossamerError, with what the first rank to fail said last, if it failed; LabError where a network is asked for that
    cannot be emulated here: gossamer's runner would slow down gossamer, and nothing that it is compared with.
    """
    found: list[Record] = []
    other: list[str] = []

    def keep(rank: int, stream: str, line: str) -> None:
        try:
            record = json.loads(line) if stream == "stdout" and line.startswith("{") else None
        except json.JSONDecodeError:
            record = None
        if record is None:
            other.append(line)
            return
        found.append(record)
        if on_record is not None:
            on_record(record)

    if spec.shaping == "auto" and any(rate.bps for rate in spec.rates):
        spec = replace(spec, shaping="namespaces")
    result = run_lab(spec, list(command), on_line=keep)
    if result.exit_code != 0:
        rates = ", ".join(dict.fromkeys(rate.text for rate in spec.rates))
        who = "" if result.failed_rank is None else f", first on rank {result.failed_rank}"
        said = result.traceback or "\n".join(other[-20:])
        raise GossamerError(f"{' '.join(command)} failed on {rates} with code {result.exit_code}{who}:\n{said}")
    return found


def lab_result(
    spec: LabSpec, command: Sequence[str], known_by: str, on_record: Callable[[Record], None] | None = None
) -> Record:
    """The last JSON object that ``command`` printed and that has the key ``known_by``; see :func:`lab_json`.

    Raises GossamerError if there is none.
    """
    results = [record for record in lab_json(spec, command, on_record) if known_by in record]
    if not results:
        raise GossamerError(f"{' '.join(command)} ended well, but printed no result")
    return results[-1]
