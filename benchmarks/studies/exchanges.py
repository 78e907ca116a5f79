"""Exchanges: runs single exchanges and collectives on several emulated networks; writes their rate beside plain TCP's.

python -m benchmarks.studies.exchanges --save-to benchmarks/results
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.studies.primitives import PATTERNS
from gossamer.bench.conditions import busy_machine, conditions, load
from gossamer.bench.in_lab import lab_json
from gossamer.bench.rows import days, markdown, merged
from gossamer.errors import GossamerError
from gossamer.lab import LabSpec

NETWORKS = ((4, "200mbit"), (4, "1gbit"), (8, "200mbit"), (8, "1gbit"))
"""Hosts and the rate of their links. On the last one the processors decide, where two of them carry all hosts."""

console = Console(stderr=True)


def table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the rate of every exchange relative to plain TCP in the same repeat: the median, and the lowest and highest."""
    head = (
        "network",
        "hosts",
        "exchange",
        "MB",
        "sent by a host, MB",
        "plain TCP, Mbit/s",
        "gossamer / TCP (lowest to highest)",
        "after 150 ms of silence (lowest to highest)",
    )
    lines = []
    for row in rows:
        sizes = (f"{row[name] / 1e6:g}" for name in ("bytes", "payload"))
        ratios = (_ratio(row["seconds"]["tcp"], row["seconds"][name]) for name in ("gossamer", "gossamer_after_silence"))
        plain = f"{row['bits_per_second']['tcp'] / 1e6:.1f}"
        lines.append([row["rate"], str(row["hosts"]), row["pattern"], *sizes, plain, *ratios])
    return markdown(head, lines)


def _ratio(plain: Sequence[float], own: Sequence[float]) -> str:
    """Of the seconds of every repeat."""
    ratios = [there / here for there, here in zip(plain, own, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"


def page(saved: dict[str, Any]) -> str:
    """What ``exchanges.md`` says of what ``exchanges.json`` holds."""
    rows = saved["exchanges"]
    machines = sorted({f"{row['cores']} cores of {row['processor']}, PyTorch {row['torch']}" for row in rows})
    return "\n".join([*table(rows), "", f"Emulated hosts on {'; '.join(machines)}. {days(rows)}"]) + "\n"


def main() -> None:
    """Measure, and save ``exchanges.json`` and ``exchanges.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-to", type=Path, default=Path("out/exchanges"))
    parser.add_argument("--mbytes", nargs="+", default=["0.5", "2", "8", "16", "64"], help="sizes in 10^6 bytes")
    networks = {f"{hosts}x{rate}": (hosts, rate) for hosts, rate in NETWORKS}
    parser.add_argument("--networks", nargs="+", choices=tuple(networks), default=list(networks), metavar="HOSTSxRATE")
    parser.add_argument("--patterns", nargs="+", choices=tuple(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for line in busy_machine():
        console.log(line)
    try:
        for hosts, rate in map(networks.__getitem__, options.networks):
            console.log(f"{hosts} hosts, {rate}")
            load_before = load()
            command = ["-m", "benchmarks.studies.primitives", "--repeats", str(options.repeats)]
            command += ["--mbytes", *options.mbytes, "--patterns", *options.patterns]
            found = lab_json(LabSpec(hosts=hosts, rate=rate), command)
            told = conditions([], load_before, {}) | {"when": round(time.time())}
            rows += [row | told for row in found]
    except GossamerError as error:
        raise SystemExit(f"exchanges: {error}") from None
    finally:
        if rows:  # what was measured before something failed, or somebody had enough, too
            _save(rows, options.save_to)


def _save(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    """Rows that this run did not measure again are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "exchanges.json"
    before = json.loads(path.read_text())["exchanges"] if path.exists() else []
    saved = {"exchanges": merged(before, rows, ("rate", "hosts", "pattern", "bytes"))}
    path.write_text(json.dumps(saved, indent=1))
    (folder / "exchanges.md").write_text(page(saved))
    console.log(f"wrote {folder / 'exchanges.md'} and exchanges.json")


if __name__ == "__main__":
    main()
