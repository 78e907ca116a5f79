"""Outer speed: steps per second of methods that train alone for many steps, beside computing alone, over a slow, far link.

Four emulated hosts, the GPT of the examples with emulated compute, 20 Mbit/s, and 50 ms added to every round trip: 25 ms
to each message, by gossamer's runner where the kernel has no netem, and then not to torchft's. Every method trains in turns
with computing alone. Once with equal hosts, once with one at half speed: its exchanges come late.
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.studies.harness import Study, console, measured_on, parser_of
from benchmarks.studies.outer_speed_rank import PERIOD, TORCHFT
from gossamer.bench.conditions import here
from gossamer.bench.rows import Column, Record, Store, code, number, text
from gossamer.lab import LabSpec, run_lab

SCRIPT = Path(__file__).with_name("outer_speed_rank.py")
HOSTS, RATE, LATENCY, SLOW = 4, "20mbit", "25ms", 3
"""``SLOW``: the host that is slow where one is."""

CASES: dict[str, dict[int, float]] = {"equal hosts": {}, "one host at half speed": {SLOW: 2.0}}
METHODS = {
    "equal hosts": (
        f"DiLoCo(every={PERIOD}, dense=0)",
        f"streaming_diloco(every={PERIOD}, fragments=4, delay=4, dense=0)",
        f"SparseLoCo(every={PERIOD}, dense=0)",
        f"DiLoCo(every={PERIOD}, averaging=Gossip(), dense=0)",
        *([TORCHFT] if find_spec("torchft") else []),
    ),
    "one host at half speed": (
        f"DiLoCo(every={PERIOD}, averaging=Gossip(), dense=0)",
        f"DiLoCo(every={PERIOD}, averaging=Gossip(), dense=0, lag={2 * PERIOD})",
        f"DiLoCo(every={PERIOD}, dense=0, lag={2 * PERIOD})",
    ),
}
ALONE = "compute"


def run(case: str, methods: Sequence[str], options: argparse.Namespace) -> list[Record]:
    """Of each method, what a step took on each host, by round."""
    said: list[dict[str, Any]] = []

    def on_line(rank: int, stream: str, line: str) -> None:
        if stream == "stdout" and "{" in line:
            said.append(json.loads(line[line.index("{") :]))
        else:
            console.log(f"rank {rank}: {line}")

    spec = LabSpec(hosts=HOSTS, rate=RATE, latency=LATENCY, slow=CASES[case], slow_by="telling", timeout=560)
    command = [str(SCRIPT), str(options.seconds), str(options.periods), str(options.rounds), ALONE, *methods]
    run_lab(spec, command, on_line=on_line)
    times = {(row["method"], row["rank"]): row["seconds"] for row in said}
    return [
        {
            "case": case, "method": method, "compute": options.seconds, "periods": options.periods, "rounds": options.rounds,
            "seconds": [times[method, rank] for rank in range(HOSTS)],
            "alone": [times[ALONE, rank] for rank in range(HOSTS)], **here(),
        }
        for method in methods
    ]  # fmt: skip


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Measure the cases that are not there yet."""
    for case, methods in METHODS.items():
        missing = [method for method in methods if store.find(case=case, method=method) is None]
        if missing:
            yield from run(case, missing, options)


def relative(row: Record) -> list[float]:
    """Steps per second beside computing alone, of the slowest host (of those that are not slowed), by round."""
    hosts = [host for host in range(HOSTS) if host not in CASES[row["case"]]]
    pairs = [zip(row["alone"][host], row["seconds"][host], strict=True) for host in hosts]
    return [min(each) for each in zip(*([alone / took for alone, took in pair] for pair in pairs), strict=True)]


def shown(rows: Sequence[Record]) -> list[Record]:
    """Rows of the table."""
    rates = [relative(row) for row in rows]
    figures = [{"median": statistics.median(each), "least": min(each), "most": max(each)} for each in rates]
    return [row | figure for row, figure in zip(rows, figures, strict=True)]


COLUMNS = (
    Column("hosts", text("case")),
    Column("method", code("method")),
    Column("steps per second beside computing alone", number("median", "{:.3f}")),
    Column("least of the rounds", number("least", "{:.3f}")),
    Column("most", number("most", "{:.3f}")),
)


def note(rows: Sequence[Record]) -> str:
    """What was measured."""
    row = rows[0]
    return (
        f"{HOSTS} hosts, 20 Mbit/s, 25 ms added to each message one way, GPT of 867,072 parameters with {row['compute']:g} s"
        f" of emulated compute per step, {row['periods']} periods of {PERIOD} steps a round, {row['rounds']} rounds in "
        f"turns with computing alone; of each round the slowest host, without the one at half speed. {measured_on(rows)}"
    )


STUDY = Study("outer_speed", ("case", "method"), lambda rows: COLUMNS, shown, note)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what is not there yet, and write the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--seconds", type=float, default=0.2, help="of emulated compute per step")
    parser.add_argument("--periods", type=int, default=2, help="of each method in a round")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each method")
    STUDY.main(parser, measure, arguments)


if __name__ == "__main__":
    main()
