"""Speed beside DDP: runs the paired timing on several emulated networks and writes a table and the raw figures.

python -m benchmarks.studies.speed --save-to benchmarks/results
"""

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from gossamer.bench.catalogue import find_workload
from gossamer.bench.conditions import busy_machine
from gossamer.bench.in_lab import lab_result
from gossamer.bench.network import parse_network
from gossamer.bench.ratios import require_scipy, spread
from gossamer.bench.rows import days, markdown, merged
from gossamer.errors import ConfigurationError, GossamerError
from gossamer.lab import LabSpec

NETWORKS = ("200mbit", "1gbit", "unshaped", "100mbit", "500mbit", "20mbit", "200mbit/slow-link=50mbit", "200mbit/slow-host=2x")
STEPS = 6
"""Steps of a method per round. Few, and the barriers at its ends, which queue behind an exchange under way, would count: with
steps of seconds that is little."""
WORKLOADS = (Path("examples/02_convnet.py"), Path("examples/01_gpt.py"))

console = Console(stderr=True)


def steps_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: step time of every method on every network, with the paired ratio to the first method."""
    lines = []
    for row in rows:
        for method, figures in row["methods"].items():
            ratio = f"{figures['ratio']:.3f} ({figures['ratio_low']:.3f} to {figures['ratio_high']:.3f})"
            ratio = "1" if method == "ddp" else ratio
            milliseconds = 1e3 * figures["step_seconds"]
            lines.append([row["workload"], row["rate"], method, f"{milliseconds:.1f}", ratio])
    return markdown(("workload", "network", "method", "ms per step", f"time relative to DDP ({spread(rows)})"), lines)


def summary_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Markdown: the same in one line per workload and network, slow ones first, without the spread."""
    methods = list(dict.fromkeys(method for row in rows for method in row["methods"] if not method.startswith("ddp")))
    lines = []
    for row in sorted(rows, key=lambda row: (row["workload"], -row["methods"]["ddp"]["step_seconds"])):
        ratios = [f"{row['methods'][method]['ratio']:.2f}" if method in row["methods"] else "" for method in methods]
        lines.append([row["workload"], row["rate"], f"{1e3 * row['methods']['ddp']['step_seconds']:.0f}", *ratios])
    return markdown(("workload", "network", "DDP, ms per step", *(f"`{method}`, times DDP" for method in methods)), lines)


def page(saved: dict[str, Any], summary: bool = False) -> str:
    """What ``speed.md`` says of what ``speed.json`` holds; or ``speed-summary.md``."""
    when = days(saved["steps"])
    table = (summary_table if summary else steps_table)(saved["steps"])
    return "\n".join([*table, "", saved["machine"] + (f". {when}" if when else "")]) + "\n"


def main() -> None:
    """Measure everything and save ``speed.json``, ``speed.md`` and ``speed-summary.md``."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-to", type=Path, default=Path("out/speed"))
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="as in gossamer bench, without a latency")
    parser.add_argument("--workloads", nargs="+", type=Path, default=list(WORKLOADS))
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args()
    try:
        require_scipy()
        for warning in busy_machine():
            console.log(warning)
        for workload in options.workloads:
            find_workload(workload)
        _measure_and_save(options, {text: _spec(text, options.hosts) for text in options.networks})
    except GossamerError as error:
        raise SystemExit(f"speed: {error}") from None


def _spec(text: str, hosts: int) -> LabSpec:
    """The emulated hosts of a network on which all methods are slowed down alike."""
    network = parse_network(text)
    if network.latency != "0":
        raise ConfigurationError(f"{text}: where the kernel cannot add a latency, gossamer's messages alone would have it")
    return network.spec(hosts, waits=False)


def _measure_and_save(options: argparse.Namespace, specs: Mapping[str, LabSpec]) -> None:
    for network, spec in specs.items():
        for workload in options.workloads:
            console.log(f"{workload.stem} on {network}: {options.rounds} rounds")
            command = ["-m", "gossamer.bench.paired", "--workload", str(workload), "--rounds", str(options.rounds)]
            found = lab_result(spec, [*command, "--steps", str(options.steps)], "methods")
            save(options.save_to, [found | {"rate": network, "when": round(time.time())}])


def save(folder: Path, steps: Sequence[dict[str, Any]]) -> None:
    """Write the raw figures and the table. Rows of an earlier run that this one did not measure again are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    before = json.loads((folder / "speed.json").read_text()) if (folder / "speed.json").exists() else {}
    steps = merged(before.get("steps", []), steps, ("workload", "rate", "world"))
    hosts = " and ".join(map(str, sorted({row["world"] for row in steps})))
    told = [row["conditions"] for row in steps if "conditions" in row]
    machines = sorted({f"{each['cores']} cores of {each['processor']}, torch {each['torch']}" for each in told})
    saved = {"machine": f"{hosts} emulated hosts on {'; '.join(machines)}", "steps": steps}
    (folder / "speed.json").write_text(json.dumps(saved, indent=1))
    (folder / "speed.md").write_text(page(saved))
    (folder / "speed-summary.md").write_text(page(saved, summary=True))
    console.log(f"wrote {folder / 'speed.md'} and {folder / 'speed.json'}")


if __name__ == "__main__":
    main()
