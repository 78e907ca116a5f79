"""Suites: measurements by name, in a file that says what each is made of; ``benchmarks/suites.toml`` has the project's own.

A table of the file is a suite. Its keys are those of :class:`Run`; ``runs`` is an array of tables that each say what one run
has otherwise. ``about`` says what it is for, and ``show`` which column of its table stands for it.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from gossamer.bench.cases import ALWAYS, Turns
from gossamer.errors import ConfigurationError

SUITES = Path("benchmarks/suites.toml")
RESULTS = Path("benchmarks/results")

_OWN = {"about", "show", "runs"}
_USUAL = Turns()


@dataclass(frozen=True)
class Run:
    """What one run of ``gossamer bench`` measures: the options of the command, by their names."""

    workloads: tuple[str, ...]
    networks: tuple[str, ...] = ("200mbit",)
    hosts: tuple[int, ...] = (4,)
    methods: tuple[str, ...] = ()
    always: tuple[str, ...] = ALWAYS
    rounds: int = _USUAL.rounds
    steps: int = _USUAL.steps
    warmup: int = _USUAL.warmup
    per_run: int = 6
    memory: bool = False

    @property
    def turns(self) -> Turns:
        """How long each case is measured."""
        return Turns(self.rounds, self.steps, self.warmup)


@dataclass(frozen=True)
class Suite:
    """Runs whose rows are in one file."""

    name: str
    about: str
    show: str
    runs: tuple[Run, ...]


def suites(path: Path = SUITES) -> dict[str, Suite]:
    """All suites of a file, by name. Raises ConfigurationError that names what in it is not understood."""
    if not path.is_file():
        raise ConfigurationError(f"there is no file {path}: run this where it is, or name it with --suites")
    try:
        found = tomllib.loads(path.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path}: {error}") from error
    return {name: _suite(name, each, f"{path}, suite {name}") for name, each in found.items()}


def find_suite(name: str, path: Path = SUITES) -> Suite:
    """One of them. Raises ConfigurationError that tells which there are."""
    known = suites(path)
    if name not in known:
        raise ConfigurationError(f"{path} has no suite {name!r}; it has {', '.join(known)}")
    return known[name]


def _suite(name: str, told: Mapping[str, Any], where: str) -> Suite:
    lacking = {"about", "show"} - told.keys()
    if lacking:
        raise ConfigurationError(f"{where} does not say {' and '.join(sorted(lacking))}")
    shared = {key: value for key, value in told.items() if key not in _OWN}
    runs = tuple(_run(shared | own, where) for own in told.get("runs", [{}]))
    return Suite(name, told["about"], told["show"], runs)


def _run(told: Mapping[str, Any], where: str) -> Run:
    known = {each.name: each.type for each in fields(Run)}
    unknown = told.keys() - known.keys()
    if unknown:
        raise ConfigurationError(f"{where}: {', '.join(sorted(unknown))} is not known; known: {', '.join(known)}")
    if not told.get("workloads"):
        raise ConfigurationError(f"{where} names no workloads")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in told.items()}
    return Run(**values)
