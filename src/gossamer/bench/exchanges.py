"""Exchanges: runs single exchanges and collectives on several emulated networks; writes their rate beside plain TCP's.

python -m gossamer.bench.exchanges --save-to benchmarks/results
"""

import argparse
import json
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from gossamer.bench.in_lab import lab_json
from gossamer.bench.primitives import PATTERNS
from gossamer.bench.rows import markdown
from gossamer.errors import GossamerError
from gossamer.lab import LabError, LabSpec

NETWORKS = ((4, "200mbit"), (4, "1gbit"), (8, "200mbit"))
"""Hosts and the rate of their links. With more hosts at more than that two cores decide, not the network."""

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
    return "\n".join([*table(saved["exchanges"]), "", saved["machine"]]) + "\n"


def main() -> None:
    """Measure everything and save ``exchanges.json`` and ``exchanges.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-to", type=Path, default=Path("out/exchanges"))
    parser.add_argument("--mbytes", nargs="+", default=["8", "16", "64"], help="sizes in 10^6 bytes")
    parser.add_argument("--patterns", nargs="+", choices=tuple(PATTERNS), default=list(PATTERNS))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    try:
        for hosts, rate in NETWORKS:
            console.log(f"{hosts} hosts, {rate}")
            command = ["-m", "gossamer.bench.primitives", "--repeats", str(options.repeats)]
            command += ["--mbytes", *options.mbytes, "--patterns", *options.patterns]
            rows += lab_json(LabSpec(hosts=hosts, rate=rate), command)
    except (GossamerError, LabError) as error:
        raise SystemExit(f"exchanges: {error}") from None
    finally:
        if rows:  # what was measured before something failed, or somebody had enough, too
            _save(rows, options.save_to)


def _save(rows: Sequence[dict[str, Any]], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    machine = f"Emulated hosts; {platform.system()} {platform.machine()}, torch {torch.__version__}"
    saved = {"machine": machine, "exchanges": rows}
    (folder / "exchanges.json").write_text(json.dumps(saved, indent=1))
    (folder / "exchanges.md").write_text(page(saved))
    console.log(f"wrote {folder / 'exchanges.md'} and exchanges.json")


if __name__ == "__main__":
    main()
