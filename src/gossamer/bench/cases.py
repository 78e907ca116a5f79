"""Cases: workloads × networks × numbers of hosts, each measured in the lab.

Every case times its methods in one run, taking turns (:mod:`gossamer.bench.paired`). A method that cannot run here, or
failed, is a row that says why; it is measured when it is asked for again.
"""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from gossamer.bench.catalogue import digest, find_workload, is_emulated
from gossamer.bench.in_lab import lab_result
from gossamer.bench.methods import parse_method
from gossamer.bench.network import parse_network
from gossamer.bench.peers import BASELINE, missing
from gossamer.bench.rows import Record
from gossamer.lab import LabSpec

REFERENCE = "ddp"
"""The method that ratios are to."""

ALWAYS = (REFERENCE, BASELINE)
"""Methods of every run, unless others are named: the reference, and what no communication at all would take."""


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


def portions(methods: Sequence[str], per_run: int, always: Sequence[str] = ALWAYS) -> Iterator[list[str]]:
    """``methods`` in portions that fit into memory together, each with those of every run before it."""
    for method in (*always, *methods):
        parse_method(method)
    others = [method for method in methods if method not in always]
    for start in range(0, len(others), per_run) or (0,):
        yield [*always, *others[start : start + per_run]]


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
    Ratios are kept where they are to the reference.
    """
    kept = ("rounds", "steps_per_round", "warmup", "tcp_bits_per_second")
    shared = {"when": round(time.time()), "name": found["workload"]} | {name: found[name] for name in kept}
    shared |= found["conditions"] | {"digest": digest(case.workload)}
    if found["latency"]:
        shared["runner_latency"] = found["latency"]
    rows, left_out = [], set() if REFERENCE in found["methods"] else {"reference_seconds", "ratio", "ratio_low", "ratio_high"}
    for method, figures in found["methods"].items():
        figures = {name: value for name, value in figures.items() if name not in left_out}
        own = {"method": method, "round_seconds": [round(each, 6) for each in found["seconds"][method]]}
        rows.append(asdict(case) | own | figures | shared)
    return rows + without_figures(case, "missing", found["missing"])


def case_of(row: Record) -> Case:
    """The case that a row is of."""
    return Case(row["workload"], row["network"], row["hosts"])
