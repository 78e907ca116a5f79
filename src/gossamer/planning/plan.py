"""Plan: measurements, the table of candidates, and the choice; a file that can be shown, pinned and used again."""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from torch import nn
from torch.optim import Optimizer

from gossamer._version import __version__
from gossamer.algorithms.base import Algorithm
from gossamer.checks import is_number
from gossamer.comm.runner import Runner
from gossamer.engine.agreement import values_of_all
from gossamer.errors import ConfigurationError
from gossamer.planning.candidates import OUTER_LOOPS, Candidate, Fidelity, check_fidelity, left_out
from gossamer.planning.choose import Prices, Row, choose, ranked, rows, tried, why
from gossamer.planning.correction import corrected
from gossamer.planning.facts import Facts, gradient_bytes, measure
from gossamer.planning.links import PATTERNS, Rate, Rates
from gossamer.planning.toml import dumps
from gossamer.simulate.profile import Compute
from gossamer.simulate.run import like
from gossamer.spelled import algorithm_of

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to train with, and why.

    ``method``: as it is written in a script. ``fidelity``: the class that was asked for. ``table``: the candidates, by
    predicted time to the same quality. ``bytes``: of the gradients.
    """

    method: str
    why: str
    fidelity: Fidelity
    model: str
    bytes: int
    optimizer: str
    facts: Facts
    table: tuple[Row, ...]
    overlap_forward: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that was chosen."""
        return algorithm_of(self.method)

    @property
    def row(self) -> Row:
        """The line of the choice."""
        return self.of(self.method, self.overlap_forward)

    def of(self, method: str, overlap_forward: bool = False) -> Row:
        """The line of a method."""
        return next(row for row in self.table if (row.method, row.overlap_forward) == (method, overlap_forward))

    def after_trial(self, seconds: float, best: Row, go_on: bool) -> "Plan":
        """The choice after steps of the chosen one took so long: the best of which steps were taken; or, if it was faster than
        the ``best`` until then and ``go_on``, one that is predicted to be faster still."""
        row = replace(self.row, step_seconds=seconds, ratio=self.row.ratio * seconds / self.row.step_seconds)
        table = ranked([row if each == self.row else each for each in self.table])
        taken = {**self.facts.steps, str(best): best.step_seconds, str(row): seconds}
        known_only = not go_on or row.seconds >= best.seconds
        chosen = choose(table, self.fidelity, self.overlap_forward, taken, known_only)
        facts = replace(self.facts, steps=taken)
        return replace(self, method=chosen.method, why=tried(row, best, chosen), facts=facts, table=tuple(table))

    def dumps(self) -> str:
        """The plan as TOML."""
        told = {name: getattr(self, name) for name in ("method", "overlap_forward", "why", "fidelity")}
        about = {name: getattr(self, name) for name in ("model", "bytes", "optimizer")} | {"left_out": list(self.left_out)}
        measured = {key: value for key, value in asdict(self.facts).items() if value is not None}
        return dumps(
            {"format": FORMAT, "gossamer": __version__}
            | {"choice": told, "training": about, "measured": measured, "table": [asdict(row) for row in self.table]}
        )

    def save(self, path: str | Path) -> None:
        """Write the plan to a file."""
        Path(path).write_text(self.dumps())

    def check(self, model: nn.Module, world: int) -> None:
        """Raise ConfigurationError unless the plan is of this model and so many ranks."""
        found = {"ranks": (self.facts.world, world), "bytes of gradients": (self.bytes, gradient_bytes(model))}
        for what, (then, now) in found.items():
            if then != now:
                raise ConfigurationError(
                    f"the plan was made for {then} {what}, and there are {now}: make another one (gossamer plan, or remove the "
                    "file), or leave plan= out"
                )


def make_plan(
    facts: Facts,
    candidates: Sequence[Candidate],
    fidelity: Fidelity,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    overlap_forward: bool = False,
    outer: Sequence[Candidate] = OUTER_LOOPS,
) -> Plan:
    """Price the candidates and choose among those with, or without, ``overlap_forward``. ``outer``: priced, and not chosen."""
    priced = rows([*candidates, *outer], Prices(facts, model, like(optimizers[0])))
    found, beside = priced[: len(candidates)], priced[len(candidates) :]
    chosen = choose(found, fidelity, overlap_forward, facts.steps)
    return Plan(
        method=chosen.method,
        overlap_forward=chosen.overlap_forward,
        why=why(chosen, found, fidelity, facts.compute.seconds),
        fidelity=fidelity,
        model=type(model).__name__,
        bytes=gradient_bytes(model),
        optimizer=", ".join(type(each).__name__ for each in optimizers),
        facts=facts,
        table=tuple(ranked(found)),
        left_out=tuple(left_out(optimizers, {str(row): row.ratio for row in beside})),
    )


Accept = Callable[..., object]
"""Called with an algorithm, a model, its optimizers, a runner and ``overlap_forward=``; raises ConfigurationError."""


def planned(
    runner: Runner,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    compute: Compute,
    found: Sequence[Candidate],
    fidelity: Fidelity,
    overlap_forward: bool,
    accept: Accept,
    noise: float | None = None,
    taken: tuple[Candidate, float] | None = None,
) -> Plan:
    """Measure, and choose on rank 0 for all. Collective, while nothing is under way. ``accept`` refuses candidates.

    ``taken``: a method of which steps were taken, and the seconds of one; links are corrected by it.
    """
    possible, outer = (
        [each for each in some if _runs(each, model, optimizers, runner, accept)] for some in (found, OUTER_LOOPS)
    )
    facts = measure(runner, compute, possible, next(iter(model.parameters())).device, noise)
    text = ""
    if runner.rank == 0:
        if taken is not None:
            facts = corrected(facts, model, like(optimizers[0]), *taken)
        text = make_plan(facts, possible, fidelity, model, optimizers, overlap_forward, outer).dumps()
    return loads(agreed(runner, text), "the plan")


def _runs(each: Candidate, model: nn.Module, optimizers: Sequence[Optimizer], runner: Runner, accept: Accept) -> bool:
    """Whether it can run here. All ranks find the same."""
    try:
        accept(each.algorithm, model, optimizers, runner, overlap_forward=each.overlap_forward)
    except ConfigurationError:
        return False
    return True


def agreed(runner: Runner, text: str) -> str:
    """The text that rank 0 has. Collective."""
    return text if runner.world == 1 else str(values_of_all(runner, text if runner.rank == 0 else "")[0])


def read_plan(path: str | Path) -> Plan:
    """The plan of a file. Raises ConfigurationError that names what in it is not understood."""
    try:
        return loads(Path(path).read_text(), str(path))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error}") from error


def loads(text: str, where: str) -> Plan:
    """The plan that a text is. ``where``: its name in errors."""
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{where}: {error}") from error
    if found.get("format") != FORMAT:
        raise ConfigurationError(f"{where} is no plan of format {FORMAT}: gossamer plan makes one")
    try:
        choice, training = dict(found["choice"]), dict(found["training"])
        check_fidelity(choice["fidelity"])
        said = {
            **choice,
            **training | {"left_out": tuple(training["left_out"])},
            "facts": _facts(found["measured"]),
            "table": tuple(_of(Row, each) for each in found["table"]),
        }
        plan: Plan = _of(Plan, said)
        plan.algorithm.check(plan.facts.world)
        plan.row  # noqa: B018  (raises where the table lacks it)
    except (KeyError, TypeError, ValueError, StopIteration, ConfigurationError) as error:
        raise ConfigurationError(f"{where}: {_told(error)}") from error
    return plan


def _told(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"{error.args[0]!r} is missing"
    return "the table has no line of the chosen method" if isinstance(error, StopIteration) else str(error)


def _facts(found: Mapping[str, Any]) -> Facts:
    made = {
        "nodes": tuple(tuple(node) for node in found["nodes"]),
        "links": _rates(found["links"]),
        "inside": _rates(found["inside"]) if "inside" in found else None,
        "compute": _of(Compute, found["compute"]),
    }
    if not set(found.get("patterns", {}).values()) <= set(PATTERNS):
        raise ConfigurationError(f"measured.patterns: each is one of {', '.join(PATTERNS)}")
    facts: Facts = _of(Facts, {**found, **made})
    return facts


def _rates(found: Mapping[str, Any]) -> Rates:
    rates: Rates = _of(Rates, {name: _of(Rate, each) for name, each in found.items()})
    return rates


_PLAIN = {float: "a number", int: "a whole number", str: "a text", bool: "true or false"}


def _of(kind: type[Any], found: Mapping[str, Any]) -> Any:
    known = {each.name for each in fields(kind)}
    unknown = sorted(set(found) - known)
    if unknown:
        raise ConfigurationError(f"{unknown[0]!r} is not known; known: {', '.join(sorted(known))}")
    for name, wanted in get_type_hints(kind).items():
        value = found.get(name)
        if name in found and wanted in _PLAIN and not (is_number(value) if wanted is float else type(value) is wanted):
            raise ConfigurationError(f"{name} must be {_PLAIN[wanted]}; got {value!r}")
    return kind(**found)
