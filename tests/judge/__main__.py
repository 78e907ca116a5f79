"""Judge: which of torch's own tests of DDP gossamer's class passes, and which of Accelerate's scripts: ``make judge``.

Runs the tests of the installed ``torch.testing`` that wrap a model in DDP, their devices mapped to the CPU, under DDP and under
``gossamer.DistributedDataParallel``, and writes ``tests/judge/results.md``. A test that DDP passes and gossamer does not has
its reason in ``reasons.py``; one without a reason ends this with an error, and so does a reason without its test.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from gossamer.lab.launcher import reserve_port
from integrations.ranks import torchrun
from judge.reasons import REASONS, TOO_LONG

HERE = Path(__file__).parent
SCRIPTS = ("test_sync", "test_script")

Row = dict[str, Any]


def run(side: str, tests: list[str]) -> dict[str, Row]:
    """The ends of the tests on one side, by name."""
    command = [sys.executable, "-W", "ignore", "-m", "judge.side", *tests]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=os.environ | {"JUDGE": side}
    )
    assert process.stdout is not None
    rows = {}
    for line in process.stdout:
        if line.startswith('{"name"'):
            row = json.loads(line)
            rows[row["name"]] = row
            print(f"{side:9} {row['end']:8} {row['seconds']:5.1f} s  {row['name']}  {row['why'][:120]}", flush=True)
    if process.wait() != 0:
        sys.exit(f"the tests under {side} ended with {process.returncode}")
    return rows


def script(name: str, side: str) -> str:
    """The end of one of Accelerate's scripts in two processes, and its last line if it failed."""
    held = reserve_port("127.0.0.1")
    port = held.getsockname()[1]
    quiet = {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "JUDGE": side}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "judge.scripts", name],
            env=os.environ | quiet | torchrun(rank, 2, port),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=300)[0] for rank in ranks]
    except subprocess.TimeoutExpired:
        return "no end within 300 s"
    finally:
        for rank in ranks:
            rank.kill()
        held.close()
    failed = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode]
    return failed[0].strip().splitlines()[-1] if failed else "passed"


def page(ddp: dict[str, Row], ours: dict[str, Row], scripts: dict[str, dict[str, str]]) -> str:
    """What is written down."""
    ends = Counter(row["end"] for row in ddp.values())
    passed = [name for name, row in ddp.items() if row["end"] == "passed"]
    failed = [name for name in passed if name not in passing(ours)]
    lines = [
        "# Other projects' own tests",
        "",
        f"Made by `make judge`, on CPUs, with torch {version('torch').split('+')[0]} and Accelerate {version('accelerate')}.",
        "",
        "## DDP's, of torch",
        "",
        f"{len(ddp) + len(TOO_LONG)} tests of `torch.testing` wrap a model in DDP. With devices mapped to the CPU and two",
        f"processes, DDP passes {ends['passed']} and fails {ends['failed']} (which need a GPU, most for `SyncBatchNorm`);",
        f"torch skips {ends['skipped']}, and {len(TOO_LONG)} is not run. gossamer passes {len(passed) - len(failed)} of the",
        f"{len(passed)}. The others:",
        "",
        "| test | why gossamer does not pass it |",
        "|---|---|",
        *(f"| `{name}` | {REASONS.get(name) or ours.get(name, {'why': 'no end'})['why']} |" for name in failed),
        "",
        *(f"Not run: `{name}`: {why}." for name, why in TOO_LONG.items()),
        "",
        "Passed by both: " + ", ".join(f"`{name}`" for name in passed if name not in failed) + ".",
        "",
        "## Accelerate's scripts",
        "",
        "| script | Accelerate with DDP | `gossamer.integrations.accelerate` |",
        "|---|---|---|",
        *(f"| `{name}.py` | {sides['ddp']} | {sides['gossamer']} |" for name, sides in scripts.items()),
        "",
    ]
    return "\n".join(lines)


def passing(rows: dict[str, Row]) -> set[str]:
    """The names of tests that passed."""
    return {name for name, row in rows.items() if row["end"] == "passed"}


def wrong(ddp: dict[str, Row], ours: dict[str, Row], scripts: dict[str, dict[str, str]]) -> list[str]:
    """What is to be mended, or to be given a reason."""
    left = passing(ddp) - passing(ours)
    return [
        *(f"{name} fails without a reason: {ours[name]['why']}" for name in sorted(left - set(REASONS)) if name in ours),
        *(f"{name} passes, or is not there, and has a reason" for name in sorted((set(REASONS) & set(ddp)) - left)),
        *(f"{name}.py: {sides}" for name, sides in scripts.items() if set(sides.values()) != {"passed"}),
    ]


def main() -> None:
    """Judge all tests, or (without writing the page) those whose names are given."""
    tests = sys.argv[1:]
    chosen = [each for each in tests if each not in SCRIPTS]
    ddp = run("ddp", chosen) if chosen or not tests else {}
    ours = run("gossamer", sorted(passing(ddp))) if ddp else {}
    names = [each for each in SCRIPTS if not tests or each in tests]
    scripts = {name: {side: script(name, side) for side in ("ddp", "gossamer")} for name in names}
    told = page(ddp, ours, scripts)
    if not tests:
        (HERE / "results.md").write_text(told)
    print(told)
    if problems := wrong(ddp, ours, scripts):
        sys.exit("\n".join(problems))


if __name__ == "__main__":
    main()
