"""Matrix: workloads × networks × numbers of hosts × ways to communicate, each case in the lab; its tables and pictures.

Every case times its methods in one run, taking turns (:mod:`gossamer.bench.paired`). A method that cannot run here, or
failed, is a row that says why; it is measured when it is asked for again.
"""

import itertools
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from gossamer.bench.catalogue import digest, find_workload, is_emulated, is_of
from gossamer.bench.in_lab import Record, lab_json, lab_result
from gossamer.bench.memory import beyond, read
from gossamer.bench.methods import parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.peers import BASELINE, PEERS, missing
from gossamer.bench.plots import Bars, Panel, times_by_method, times_over_hosts
from gossamer.bench.ratios import SPREAD
from gossamer.bench.rows import day, markdown
from gossamer.lab import LabSpec

ALWAYS = ("ddp", BASELINE)
"""Methods of every case: the reference of the ratios, and what no communication at all would take."""

NOISY = 0.05
"""Half-width of a ratio's interval (or range) from which a row is called noisy."""

UNSHAPED = "unshaped"

ROUNDS = "rounds of steps"
RATIO = f"relative to DDP ({SPREAD})"
HEAD = (
    "workload", "network", "hosts", "method", ROUNDS, "ms per step", RATIO, "relative to compute", "bound, ms",
    "step / bound", "payload, MB", "on the wire, MB", "communication, ms", "exposed, ms", "CPU, ms", "memory / gradients",
    "measured",
)  # fmt: skip
"""Columns of the table."""


@dataclass(frozen=True, slots=True)
class Case:
    """One workload on one network, spelled as in :mod:`gossamer.bench.network`."""

    workload: str
    network: str
    hosts: int

    def spec(self) -> LabSpec:
        """The emulated hosts. Raises ConfigurationError for a network that cannot be made."""
        return parse_network(self.network).spec(self.hosts, waits=is_emulated(self.workload))

    def __str__(self) -> str:
        name = Path(self.workload).stem if self.workload.endswith(".py") else self.workload
        return f"{name} on {self.network}, {self.hosts} host{'s' if self.hosts > 1 else ''}"


@dataclass(frozen=True, slots=True)
class Turns:
    """How long a case is measured: rounds of a few steps of each method, after warm-up steps."""

    rounds: int = 20
    steps: int = 5
    warmup: int = 4

    def cover(self, wanted: "Turns") -> bool:
        """Whether these are as long as ``wanted`` in every respect."""
        return self.rounds >= wanted.rounds and self.steps >= wanted.steps and self.warmup >= wanted.warmup


def is_measured(row: Record) -> bool:
    """Whether a row has figures; otherwise it says why there are none."""
    return not {"missing", "failed"} & row.keys()


def cases(workloads: Sequence[str], networks: Sequence[str], hosts: Sequence[int]) -> list[Case]:
    """All combinations. Raises ConfigurationError before anything is measured if one of them cannot be."""
    for workload in workloads:
        find_workload(workload)
    result = [Case(*each) for each in itertools.product(workloads, networks, hosts)]
    for case in result:
        case.spec()
    return result


def portions(methods: Sequence[str], per_run: int) -> Iterator[list[str]]:
    """``methods`` in portions that fit into memory together, each with the methods of every case before it."""
    for method in methods:
        parse_method(method)
    others = [method for method in methods if method not in ALWAYS]
    for start in range(0, len(others), per_run) or (0,):
        yield [*ALWAYS, *others[start : start + per_run]]


def absent(case: Case, methods: Iterable[str]) -> list[Record]:
    """Rows of those of ``methods`` that cannot run on this machine."""
    return without_figures(case, "missing", missing(methods))


def without_figures(case: Case, what: Literal["missing", "failed"], reasons: Mapping[str, str]) -> list[Record]:
    """Rows of methods that have none, each with its reason: they cannot run, or failed when they were tried."""
    if not reasons:
        return []
    shared: Record = {"name": find_workload(case.workload).name, "when": round(time.time())}
    if what == "failed":
        shared["digest"] = digest(case.workload)
    return [asdict(case) | {"method": method, what: reason} | shared for method, reason in reasons.items()]


def measure(
    case: Case, methods: Sequence[str], turns: Turns, on_record: Callable[[Record], None] | None = None
) -> list[Record]:
    """Rows of one case: figures of every method, and what they were measured with; or why a method cannot run."""
    command = ["-m", "gossamer.bench.paired", "--workload", case.workload, "--methods", *methods]
    numbers = {"--rounds": turns.rounds, "--steps": turns.steps, "--warmup": turns.warmup}
    command += [str(part) for pair in numbers.items() for part in pair]
    return rows_of(case, lab_result(case.spec(), command, "methods", on_record))


def rows_of(case: Case, found: Record) -> list[Record]:
    """What :func:`gossamer.bench.paired.run` found, as a row for every method.

    ``runner_latency``: the seconds that gossamer's runner adds to its own messages, where the network adds none by itself.
    """
    kept = ("rounds", "steps_per_round", "warmup", "tcp_bits_per_second")
    shared = {"when": round(time.time()), "name": found["workload"]} | {name: found[name] for name in kept}
    shared |= found["conditions"] | {"digest": digest(case.workload)}
    if found["latency"]:
        shared["runner_latency"] = found["latency"]
    rows = []
    for method, figures in found["methods"].items():
        own = {"method": method, "round_seconds": [round(each, 6) for each in found["seconds"][method]]}
        rows.append(asdict(case) | own | figures | shared)
    return rows + without_figures(case, "missing", found["missing"])


def measure_memory(case: Case, methods: Sequence[str]) -> dict[str, Record]:
    """What every method needs at its peak beyond training without communication; see :mod:`gossamer.bench.memory`.

    On an unshaped network, whatever the case's is: memory does not depend on the rate, and over a slow link it takes minutes.
    """
    command = ["-m", "gossamer.bench.memory", "--workload", case.workload, "--methods", *methods]
    return beyond(read(lab_json(replace(case, network=UNSHAPED).spec(), command)))


def table(rows: Sequence[Record]) -> list[str]:
    """Markdown: every row, grouped by case. Cells of what a row does not tell are empty.

    Ratios are those of the row's own run; rows of a case may be of several, each with a ``ddp`` and a ``compute`` of its own.
    """
    order = {case: place for place, case in enumerate(dict.fromkeys(map(case_of, rows)))}
    newest = newest_files(rows)
    made = [cells(row, newest.get(row["workload"])) for row in sorted(rows, key=lambda row: order[case_of(row)])]
    return markdown(HEAD, [[cell.replace("|", "\\|") for cell in each] for each in made])


def case_of(row: Record) -> Case:
    """The case that a row is of."""
    return Case(row["workload"], row["network"], row["hosts"])


def newest_files(rows: Sequence[Record]) -> dict[str, str]:
    """By workload, the version of its file that was measured last."""
    return {row["workload"]: row["digest"] for row in sorted(rows, key=lambda row: row.get("when", 0)) if row.get("digest")}


def cells(row: Record, of_file: str | None) -> list[str]:
    """What the columns of ``HEAD`` say of a row; ``of_file``: the version of its workload's file that others are of."""
    older = "" if is_of(row, of_file) else " (another version of its file)"
    undelayed = " (not delayed)" if row.get("runner_latency") and row["method"] in PEERS else ""
    case = [row["name"] + older, row["network"] + undelayed, str(row["hosts"]), f"`{row['method']}`"]
    measured = day(row["when"]) if "when" in row else ""
    if not is_measured(row):
        return [*case, "", "", reason(row), *[""] * (len(HEAD) - 8), measured]
    bounds = [row[name] for name in ("bound_seconds", "layered_bound_seconds") if row.get(name) is not None]
    gossamers = bool(row["wire_seconds"])
    return [
        *case,
        f"{row['rounds']} of {row['timed_steps']}" if "timed_steps" in row else str(row["rounds"]),
        _milliseconds(row["step_seconds"]) + (" (two phases)" if row.get("two_phases") else ""),
        "1" if row["method"] == "ddp" else _ratio(row, "ratio"),
        "1" if row["method"] == BASELINE else _ratio(row, "ratio_to_compute"),
        _two([_milliseconds(bound) for bound in bounds]),
        _two([f"{row['step_seconds'] / bound:.3f}" for bound in bounds]),
        megabytes(_payload(row)),
        megabytes(row["interface_bytes"]),
        _milliseconds(row["wire_seconds"]) if gossamers else "",
        _milliseconds(row["exposed_seconds"]) if gossamers else "",
        _milliseconds(row["cpu_seconds"]),
        _memory(row),
        measured,
    ]


def _two(texts: Sequence[str]) -> str:
    """The figure of a bound, and if there is one that of what the model's layers allow."""
    return f"{texts[0]} (layer by layer {texts[1]})" if len(texts) > 1 else "".join(texts)


def reason(row: Record) -> str:
    """Why a row has no figures, on one line."""
    told = f"not run: {row['missing']}" if "missing" in row else f"failed: {row['failed']}"
    return " ".join(told.split())


def _ratio(row: Record, name: str) -> str:
    """A ratio with its spread, as far as the row tells."""
    if name not in row:
        return ""
    ratio, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})" + (" (noisy)" if high - low > 2 * NOISY * ratio else "")


def _payload(row: Record) -> float | None:
    """What a row says of its payload; nothing where nobody knows it (old rows have a zero there)."""
    known = row["method"] not in PEERS or PEERS[row["method"]].payload is not None
    return row["payload_bytes"] if known else None


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f}"


def megabytes(nbytes: float | None) -> str:
    """For a table; nothing for what nobody knows."""
    return "" if nbytes is None else f"{nbytes / 1e6:.2f}"


def _memory(row: Record) -> str:
    """The peak beyond ``compute``, with its noise, unless it is zero by definition."""
    if "memory" not in row or row["method"] == BASELINE:
        return ""
    return f"{row['memory']:.2f} ± {row['memory_noise']:.2f}"


def draw(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Pictures for every workload: of step times over the number of hosts on networks with several, on others by method.

    Of the version of its file that was measured last.
    """
    newest = newest_files(rows)
    rows = [row for row in rows if is_measured(row) and is_of(row, newest.get(row["workload"]))]
    by_workload = {row["workload"]: [each for each in rows if each["workload"] == row["workload"]] for row in rows}
    return [path for own in by_workload.values() for path in _draw(own, folder)]


def _draw(rows: Sequence[Record], folder: Path) -> Iterator[Path]:
    """The pictures of one workload."""
    stem, name = re.sub(r"[^A-Za-z0-9]+", "-", rows[0]["workload"]).strip("-").lower(), rows[0]["name"]
    networks = {row["network"]: [each for each in rows if each["network"] == row["network"]] for row in rows}
    panels = {network: panel for network, own in networks.items() if (panel := _over_hosts(network, own)) is not None}
    if panels:
        path = folder / f"{stem}-hosts.png"
        times_over_hosts(path, list(panels.values()), title=f"{name}: step time over the number of hosts")
        yield path
    others = {network: own for network, own in networks.items() if network not in panels}
    if others:
        path, hosts = folder / f"{stem}-methods.png", sorted({row["hosts"] for own in others.values() for row in own})
        counted = f"{' or '.join(map(str, hosts))} host{'s' if hosts != [1] else ''}"
        times_by_method(path, [_by_method(*each) for each in others.items()], title=f"{name}, {counted}: step time")
        yield path


def _over_hosts(network: str, rows: Sequence[Record]) -> Panel | None:
    """None if no method was measured with several numbers of hosts."""
    seconds: dict[str, dict[int, float]] = {}
    bounds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(row["method"], {})[row["hosts"]] = row["step_seconds"]
        if row.get("bound_seconds") is not None and row["method"] != BASELINE:
            bounds.setdefault(row["method"], {})[row["hosts"]] = row["bound_seconds"]
    return Panel(network, seconds, bounds) if max(map(len, seconds.values())) > 1 else None


def _by_method(network: str, rows: Sequence[Record]) -> Bars:
    """First what every case has, then the others as they were measured."""
    rows = sorted(rows, key=lambda row: row["method"] not in ALWAYS)
    seconds = {row["method"]: row["step_seconds"] for row in rows}
    bounds = {row["method"]: row["bound_seconds"] for row in rows if "bound_seconds" in row}
    return Bars(network, seconds, bounds, ours=seconds.keys() - PEERS.keys())
