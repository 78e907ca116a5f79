"""Demo: the example GPT on emulated hosts with a slow network, trained with DDP and then with gossamer.

python -m benchmarks.demo
"""

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.demo.display import Display
from benchmarks.demo.report import Report
from benchmarks.demo.run import SCRIPT, DemoError, Run, save_logs, train
from gossamer.algorithms import registry
from gossamer.bench.conditions import busy_machine
from gossamer.bench.plots import require_matplotlib
from gossamer.errors import GossamerError
from gossamer.lab import LabSpec

LOGS = Path("out/demo")

COMPUTE_STEPS = 40
"""Enough for the mean time of a step without communication."""

UNLIMITED = 1_000_000
"""Steps, where time is the limit."""


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--rate", default="200mbit", help="of every host, both ways")
    parser.add_argument("--shaping", default="auto", help="as in gossamer lab")
    parser.add_argument("--seconds", type=float, default=45.0, help="training time of each method")
    parser.add_argument("--steps", type=int, help="train every method for so many steps instead")
    parser.add_argument(
        "--methods", nargs="+", default=["ddp", "gossip:bf16"], metavar="METHOD[:WIRE]",
        help=f"ddp, {', '.join(name.lower() for name in registry())}; the first one is the reference",
    )  # fmt: skip
    parser.add_argument("--eval-every", type=int, default=25, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-to", type=Path, default=LOGS, help="folder for demo.png and demo.md")
    return parser.parse_args(arguments)


def make_run(method: str, options: argparse.Namespace, title: str = "") -> Run:
    """The run of ``"ddp"``, ``"none"``, or an algorithm with its wire, as ``"gossip:bf16"``."""
    name, _, wire = method.partition(":")
    titles = {"none": "computing alone", "ddp": "PyTorch DDP"} | {key.lower(): f"gossamer {key}" for key in registry()}
    if name not in titles:
        raise DemoError(f"unknown method {name!r}; known: {', '.join(titles)}")
    timed = options.steps is None and name != "none"
    steps = options.steps or (UNLIMITED if timed else COMPUTE_STEPS)
    every = steps if name == "none" else options.eval_every
    arguments = ["--method", name, *(["--wire", wire] if wire else []), "--seed", str(options.seed)]
    arguments += ["--steps", str(steps), "--eval-every", str(every), *(["--seconds", str(options.seconds)] if timed else [])]
    title = title or titles[name] + (f", {wire}" if wire else "")
    return Run(method.replace(":", "-"), title, tuple(arguments), steps, options.seconds if timed else math.inf)


def run_demo(options: argparse.Namespace, console: Console) -> Report:
    """Train everything in turn."""
    spec = LabSpec(
        hosts=options.hosts, rate=options.rate, shaping=options.shaping, timeout=600 + 4 * (options.steps or options.seconds)
    )
    compute, *runs = [make_run(method, options) for method in ("none", *options.methods)]
    notes, network = busy_machine(), describe(spec)
    with Display(console, f"byte-level GPT on {network}", [compute, *runs]) as display:
        first = train(compute, spec, display.refresh)
        notes += first.notes
        if first.shaping == "runner":
            notes += stand_in(runs, options)
            display.show([compute, *runs])
        try:
            for run in runs:
                train(run, spec, display.refresh)
        finally:
            save_logs([compute, *runs], LOGS)
    size = f"{compute.header['parameters'] / 1e6:.2f} million parameters"
    return Report(f"byte-level GPT ({size}), {network}", compute, runs, notes)


def describe(spec: LabSpec) -> str:
    """The hosts and their network, in words."""
    rates = ["unshaped" if rate.bps is None else f"{rate.bps / 1e6:g} Mbit/s" for rate in spec.rates]
    return f"{spec.hosts} emulated hosts, {f'{rates[0]} each' if len(set(rates)) == 1 else ', '.join(rates)}"


def stand_in(runs: list[Run], options: argparse.Namespace) -> list[str]:
    """Where only gossamer's own traffic can be shaped, its exact all-reduce takes DDP's place; says so."""
    stood_in = [index for index, run in enumerate(runs) if run.name == "ddp"]
    for index in stood_in:
        runs[index] = make_run("allreduce:fp32", options, "exact all-reduce, in DDP's place")
    return ["DDP's traffic cannot be shaped here: gossamer's exact all-reduce in fp32 stands in its place."] if stood_in else []


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit code."""
    options, console = parse_options(arguments), Console()
    try:
        if not SCRIPT.exists():
            raise DemoError(f"the demo trains examples/01_gpt.py of gossamer's repository, which is not at {SCRIPT}")
        require_matplotlib()
        for folder in (options.save_to, LOGS):
            folder.mkdir(parents=True, exist_ok=True)
        report = run_demo(options, console)
    except (GossamerError, OSError) as error:
        Console(stderr=True).print(f"demo: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        return 130
    conclude(report, options.save_to, console)
    return 0


def conclude(report: Report, folder: Path, console: Console) -> None:
    """Show the table; save it and the picture, and say where."""
    console.print(report.table())
    for line in report.explanations():
        console.print(line, style="dim", highlight=False, soft_wrap=not console.is_terminal)
    report.draw(folder / "demo.png")
    (folder / "demo.md").write_text(report.markdown())
    console.print(f"picture: {folder / 'demo.png'}\ntable:   {folder / 'demo.md'}\nlogs:    {LOGS}", highlight=False)


if __name__ == "__main__":
    sys.exit(main())
