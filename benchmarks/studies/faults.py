"""Faults: what every survivor is told when a rank is killed or stopped, or a host is cut off or switched off.

    python -m benchmarks.studies.faults        (make study NAME=faults)

Runs each case in the lab, on three emulated hosts, keeps one row per case in ``results/faults.jsonl`` (cases that have one
are not run again) and writes the table ``results/faults.md``.
"""

import json
import re
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import gossamer
from benchmarks.studies.faults_rank import SAVED, SAVING, TIMEOUT
from gossamer import checkpoint
from gossamer.lab import LabSpec, run_lab

RESULTS = Path(__file__).parents[1] / "results"
SCRIPT = Path(__file__).with_name("faults_rank.py")
WORLD = 3
SILENT_AFTER = 10.0
"""Seconds after which a host that answers nothing counts as vanished (``links.SILENT_AFTER``)."""

MOMENTS = (
    "before init_process_group",
    "before replicate",
    "in backward",
    "before the optimizer's step",
    "after the optimizer's step",
    *SAVING.values(),
    "before close",
    "after close",
    "after destroy_process_group",
)
LAB = {
    "stop, shorter than the timeout": ("stop {victim} 6s @line:training", None),
    "stop, longer than the timeout": ("stop {victim} 24s @line:training", TIMEOUT),
    "cut for 4 s": ("cut {victim} 4s @line:training", None),
    "cut": ("cut {victim} @line:training", SILENT_AFTER),
    "power-off": ("power-off {victim} @line:training", SILENT_AFTER),
}
"""Faults by name: how the lab causes them, and the limit in seconds; None where every rank is to go on."""


@dataclass(frozen=True)
class Case:
    """One run. ``limit``: seconds after which survivors are to be told; None if all are to go on."""

    fault: str
    moment: str
    victim: int
    algorithm: str
    limit: float | None

    @property
    def faults(self) -> tuple[str, ...]:
        """What the lab does."""
        return () if self.fault == "kill -9" else (LAB[self.fault][0].format(victim=self.victim),)


def cases() -> Iterable[Case]:
    """All of them; the store is hosted by rank 0."""
    for victim in (2, 0):
        for fault, (_, limit) in LAB.items():
            for algorithm in ("AllReduce", "Gossip"):
                yield Case(fault, "in training", victim, algorithm, limit)
        for moment in MOMENTS:
            # Before there is a group, torch's own timeout is the limit. After close() nobody waits for anything of gossamer's.
            limit = TIMEOUT if moment == "before init_process_group" else 0.0
            yield Case("kill -9", moment, victim, "AllReduce", limit)
        yield Case("kill -9", "in backward", victim, "Gossip", 0.0)


def run(case: Case) -> dict[str, Any]:
    """What every rank said."""
    said: list[dict[str, Any]] = []
    warnings: list[str] = []

    def on_line(rank: int, stream: str, line: str) -> None:
        if stream == "stdout" and "{" in line:
            said.append(json.loads(line[line.index("{") :]))
        elif "has waited" in line:
            warnings.append(line)

    moment = case.moment if case.fault == "kill -9" else "lab"
    with tempfile.TemporaryDirectory(prefix="gossamer-faults-") as folder:
        command = [str(SCRIPT), case.algorithm, str(case.victim), moment, folder]
        faults = case.faults or ("kill 0 @1000s",)
        spec = LabSpec(hosts=WORLD, rate="100mbit", shaping="namespaces", faults=faults, timeout=300)
        result = run_lab(spec, command, on_line=on_line)
        latest = checkpoint.latest(folder) if moment in SAVING.values() else None
    begin = max((row["fault_at"] for row in said if "fault_at" in row), default=None)  # a killed rank has said that it trains
    ranks = [row | {"seconds": row["end"] - begin} for row in said if "rank" in row and begin is not None]
    told = {"hung": result.timed_out, "latest": latest, "ranks": sorted(ranks, key=lambda row: row["rank"])}
    return asdict(case) | told | {"warnings": warnings}


def named(row: dict[str, Any], text: str) -> bool:
    """Whether an error names the victim."""
    return any(str(row["victim"]) in re.findall(r"\d+", found) for found in re.findall(r"ranks? [\d, ]*\d", text))


def _class(told: dict[str, Any]) -> str:
    """The class of an error, and whether it comes from a call of torch's own."""
    return told["error"] if told["error"] in gossamer.__all__ else f"torch's {told['error']}"


def summary(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    survivors = [each for each in row["ranks"] if each["rank"] != row["victim"]]
    told = [each for each in survivors if each["error"]]
    victim = next((each["error"] or "goes on" for each in row["ranks"] if each["rank"] == row["victim"]), "ended")
    errors = ", ".join(dict.fromkeys(map(_class, told))) or ("hung" if row["hung"] else "all go on")
    late = f"{max(each['seconds'] for each in told) - (row['limit'] or 0.0):.1f}" if told else ""
    names = f"{sum(named(row, each['text']) for each in told)} of {len(told)}" if told else ""
    where = f"{row['fault']}, {row['moment']}"
    if row["moment"] in SAVING.values():
        victim += f"; `latest()` is step {row['latest']}"
    return [where, str(row["victim"]), row["algorithm"], errors, names, late, "hung" if row["hung"] else victim]


HEAD = ["fault", "rank", "algorithm", "survivors are told", "culprit named", "seconds beyond the limit", "the victim itself"]


def table(rows: list[dict[str, Any]]) -> str:
    """The result as Markdown."""
    lines = [HEAD, ["---"] * len(HEAD), *map(summary, rows)]
    about = (
        f"{WORLD} emulated hosts at 100 Mbit/s, one rank each; rank 0 hosts the store. `timeout` is {TIMEOUT:g} s, also of the "
        "process group. The limit: nothing for a killed process, whose connections its kernel closes; "
        f"{SILENT_AFTER:g} s for a host that answers nothing; the timeout for a process that is stopped, and before there is a "
        "process group. There, and in the script's `dist.barrier()` at the end, the wait is torch's own, and so is "
        "the error. Seconds are those of the slowest survivor, of one run per row; a machine that has other work makes them "
        f"longer. The save in which a rank is killed is the second; step {SAVED} was saved before. By `make study NAME=faults`."
    )
    return "# Failures of machines\n\n" + about + "\n\n" + "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def main() -> None:
    """Run what has no row yet, and write the table."""
    store = RESULTS / "faults.jsonl"
    rows = [json.loads(line) for line in store.read_text().splitlines()] if store.exists() else []
    keys = [field for field in Case.__dataclass_fields__ if field != "limit"]
    done = {tuple(row[key] for key in keys) for row in rows}
    for case in cases():
        if tuple(asdict(case)[key] for key in keys) in done:
            continue
        rows.append(run(case))
        with store.open("a") as file:
            file.write(json.dumps(rows[-1]) + "\n")
        sys.stdout.write(" | ".join(summary(rows[-1])) + "\n")
    (RESULTS / "faults.md").write_text(table(rows))


if __name__ == "__main__":
    main()
