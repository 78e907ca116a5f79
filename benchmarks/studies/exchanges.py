"""Exchanges: single exchanges and collectives beside what plain TCP sockets reach in the same repeat, on emulated networks.

Every repeat first sends as many bytes over plain TCP (both directions concurrently, a drained token bucket, the slowest
rank), then over gossamer's runner, once behind another exchange and once after 150 ms of silence.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence

from benchmarks.studies.harness import AS_RANK, Study, console, parser_of
from benchmarks.studies.primitives import PATTERNS, measured
from gossamer.bench.conditions import conditions, load
from gossamer.bench.in_lab import lab_json
from gossamer.bench.rows import Column, Record, Store, number, text
from gossamer.lab import LabSpec

NETWORKS = ((4, "200mbit"), (4, "1gbit"), (8, "200mbit"), (8, "1gbit"))
"""Hosts and the rate of their links. On the last one the processors decide, where two of them carry all hosts."""


def _ratio(name: str) -> Callable[[Record], str]:
    """Of the seconds of every repeat: the median, and the lowest and highest."""

    def cell(row: Record) -> str:
        ratios = [there / here for there, here in zip(row["seconds"]["tcp"], row["seconds"][name], strict=True)]
        return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"

    return cell


COLUMNS = (
    Column("network", text("network")),
    Column("hosts", text("hosts")),
    Column("exchange", text("pattern")),
    Column("MB", number("bytes", "{:g}", 1e-6)),
    Column("sent by a host, MB", number("payload", "{:g}", 1e-6)),
    Column("plain TCP, Mbit/s", lambda row: f"{row['bits_per_second']['tcp'] / 1e6:.1f}"),
    Column("gossamer / TCP (lowest to highest)", _ratio("gossamer")),
    Column("after 150 ms of silence (lowest to highest)", _ratio("gossamer_after_silence")),
)

STUDY = Study("exchanges", ("network", "hosts", "pattern", "bytes"), lambda rows: COLUMNS)


def measure(options: argparse.Namespace, store: Store) -> Iterator[Record]:
    """Every network in a lab of its own."""
    networks = {f"{hosts}x{rate}": (hosts, rate) for hosts, rate in NETWORKS}
    for hosts, rate in map(networks.__getitem__, options.networks):
        console.log(f"{hosts} hosts, {rate}")
        load_before = load()
        command = ["-m", "benchmarks.studies.exchanges", AS_RANK, "--repeats", str(options.repeats)]
        command += ["--mbytes", *options.mbytes, "--patterns", *options.patterns]
        found = lab_json(LabSpec(hosts=hosts, rate=rate), command)
        yield from ({"network": rate} | row | conditions([], load_before, {}) for row in found)


def on_ranks(options: argparse.Namespace) -> Iterator[Record]:
    """Measure among the ranks of this launch."""
    return measured(options.patterns, list(map(float, options.mbytes)), options.repeats)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure; as a rank of the lab, print what was measured."""
    parser = parser_of(__doc__)
    parser.add_argument("--mbytes", nargs="+", default=["0.5", "2", "8", "16", "64"], help="sizes in 10^6 bytes")
    networks = [f"{hosts}x{rate}" for hosts, rate in NETWORKS]
    parser.add_argument("--networks", nargs="+", choices=networks, default=networks, metavar="HOSTSxRATE")
    parser.add_argument("--patterns", nargs="+", choices=tuple(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--repeats", type=int, default=5)
    STUDY.main(parser, measure, arguments, on_ranks)


if __name__ == "__main__":
    main()
