"""Versions: the tests with other releases of torch and Python, each pair in an environment of its own: ``make test-versions``.

Every release of torch runs with the first Python, and the newest with every Python. A pair that cannot be installed is named,
with pip's reason, and ends the command with an error as a failed test does.
"""

import argparse
import os
import subprocess
import sys
from pathlib import Path
from shutil import rmtree, which

TESTS = (
    "tests/test_replicate.py",
    "tests/test_distributed_data_parallel.py",
    "tests/test_public_surface.py",
    "tests/contracts",
    "tests/engine",
    "tests/processes/test_equality.py",
    "tests/processes/test_sharded.py",
)
"""What depends on torch's hooks, process groups and sharding."""

FOLDER = Path("out/versions")


def pairs(torches: list[str], pythons: list[str]) -> list[tuple[str, str]]:
    """Python and torch of each environment."""
    return list(dict.fromkeys([*((pythons[0], each) for each in torches), *((each, torches[-1]) for each in pythons)]))


def environment(python: str, torch: str) -> Path:
    """Where it is made. It takes 6 GB (torch with CUDA), and is removed after its tests."""
    return FOLDER / f"{Path(python).name}-torch{torch}"


def install(python: str, torch: str) -> str | None:
    """Make the environment; why it could not be made, or None."""
    found = which(python)
    if found is None:
        return f"there is no {python} here"
    folder = environment(python, torch)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    commands = (
        [found, "-c", "import sys; sys.exit(sys.version_info < (3, 11) and 'gossamer needs Python 3.11')"],
        [found, "-m", "venv", str(folder)],
        [*pip, f"torch=={torch}"],
        [*pip, f"torch=={torch}", "--editable", ".[dev]"],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
            return lines[-1] if lines else f"{command} failed"
    return None


def outcome(python: str, torch: str, tests: list[str]) -> str:
    """What became of one pair, in words."""
    if missing := install(python, torch):
        return f"not installed: {missing}"
    own = str(environment(python, torch) / "bin" / "python")
    command = [own, "-m", "pytest", "-q", "-m", "not slow", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, text=True)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else "no output"
    if done.returncode:
        print(done.stdout[-6000:])
    return f"{'passed' if done.returncode == 0 else 'failed'}: {last.strip('= ')}"


def main() -> None:
    """Run every pair, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torch", nargs="+", required=True, help="releases, the newest last")
    parser.add_argument("--python", nargs="+", required=True, help="interpreters")
    parser.add_argument("--tests", nargs="+", default=list(TESTS))
    options = parser.parse_args()
    found = {}
    for python, torch in pairs(options.torch, options.python):
        try:
            found[python, torch] = outcome(python, torch, options.tests)
        finally:
            rmtree(environment(python, torch), ignore_errors=True)
        print(f"{python}, torch {torch}: {found[python, torch]}", flush=True)
    problems = [pair for pair, end in found.items() if not end.startswith("passed")]
    if problems:
        sys.exit("\n".join(f"{python}, torch {torch}: {found[python, torch]}" for python, torch in problems))


if __name__ == "__main__":
    main()
