"""Session: cases measured one after the other: what is there is left alone, and what fails takes nothing else along."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from gossamer.bench.cases import Case, Turns, is_measured, portions, without_figures
from gossamer.bench.results import Results
from gossamer.bench.rows import Record, days
from gossamer.bench.suites import Run
from gossamer.bench.tables import reason
from gossamer.bench.trained import MethodError
from gossamer.errors import GossamerError
from gossamer.lab import LabError


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is measured: in the lab, or where these ranks are. All is called on all ranks."""

    conditions: Callable[[], Mapping[str, Any]]
    """What a row would tell of this place."""
    warnings: Callable[[], list[str]]
    """Why figures would not be good now."""
    absent: Callable[[Case, Sequence[str]], list[Record]]
    """Rows of methods that need not be tried, because they cannot run."""
    measure: Callable[[Case, Sequence[str], Turns, Callable[[Record], None]], list[Record]]
    separate: bool
    """Whether each is measured in processes of its own, and one that fails leaves the next unharmed."""


class Session:
    """Measures what is lacking, and keeps it as soon as it is there."""

    def __init__(self, place: Place, run: Run, results: Results, progress: Progress, again: bool = False) -> None:
        """``again``: measure anew what is there."""
        self._place, self._run, self._results, self._progress, self._again = place, run, results, progress, again

    def run(self, cases: Sequence[Case]) -> None:
        """Measure all cases. Raises GossamerError that tells all that failed, at the end if the others could go on."""
        failed: list[str] = []
        self._say(self._place.warnings())
        conditions = self._place.conditions()
        for case in cases:
            self._say(self._known(case, conditions))
            failed += self._each(case, self._lacking(case))
        if failed:
            raise GossamerError("what was measured is kept; this failed:\n" + "\n".join(failed))

    def _known(self, case: Case, conditions: Mapping[str, Any]) -> list[str]:
        """What is there already, and what of it was otherwise when it was measured."""
        there = [] if self._again else list(self._results.there(case, self._run.turns).items())
        rows = [row for method, row in there if method in self._run.methods]
        if not rows:
            return []
        told = f"{case}: {len(rows)} of {len(self._run.methods)} methods are there; --again measures them anew. {days(rows)}"
        others = {name: [row[name] for row in rows if row.get(name, now) != now] for name, now in conditions.items()}
        differ = [f"{name} {_short(other[0])} → {_short(conditions[name])}" for name, other in others.items() if other]
        return [told.strip(), *([f"Changed since: {'; '.join(differ)}"] if differ else [])]

    def _lacking(self, case: Case) -> list[list[str]]:
        """The portions to time; what failed before comes last, each by itself."""
        run, results = self._run, self._results
        wanted = list(run.methods) if self._again else results.lacking(case, run.methods, run.turns)
        missing = self._place.absent(case, wanted)
        results.add(missing)
        self._log(case, missing)
        absent = {row["method"] for row in missing}
        before = results.failed(case)
        fresh = [method for method in wanted if method not in absent | before]
        tried = [method for method in wanted if method in before - absent]
        made = [*portions(fresh, run.per_run, run.always), *(portions(tried, 1, run.always) if tried else [])]
        return [each for each in made if self._again or results.lacking(case, each, run.turns)]

    def _each(self, case: Case, waiting: Sequence[list[str]]) -> list[str]:
        """Time every portion; one that fails is taken apart, and what then fails is returned, in words."""
        always, failed, left = self._run.always, [], deque(waiting)
        while left:
            portion = left.popleft()
            own = [method for method in portion if method not in always]
            try:
                self._time(case, portion)
            except LabError:  # no other portion will run here either
                raise
            except GossamerError as error:
                apart = [[*always, method] for method in own] if self._place.separate and len(own) > 1 else []
                if not apart:
                    self._results.add(without_figures(case, "failed", _blamed(error, own or portion, always)))
                if not self._place.separate:
                    raise
                told = f"{case}, {', '.join(portion)}: "
                self._say([told + _last_line(error), *(["each of these methods is measured by itself now"] if apart else [])])
                left.extendleft(reversed(apart))
                failed += [] if apart else [told + str(error)]
        return failed

    def _time(self, case: Case, portion: list[str]) -> None:
        """Time methods that share a run."""
        turns = self._run.turns
        with self._bar(f"{case}: {len(portion)} methods", turns.rounds) as note:
            rows = self._place.measure(case, portion, turns, note)
        self._results.add(rows)
        self._log(case, rows)

    @contextmanager
    def _bar(self, what: str, total: int) -> Iterator[Callable[[Record], None]]:
        bar = self._progress.add_task(what, total=total)

        def note(record: Record) -> None:
            if "round" in record:
                self._progress.update(bar, completed=record["round"])

        try:
            yield note
        finally:
            self._progress.remove_task(bar)

    def _log(self, case: Case, rows: Sequence[Record]) -> None:
        self._say([f"{case}: {row['method']} {_found(row)}" for row in rows])

    def _say(self, lines: Sequence[str]) -> None:
        for line in () if self._progress.disable else lines:
            self._progress.log(line, markup=False)


def _found(row: Record) -> str:
    return (
        f"{1e3 * row['step_seconds']:.1f} ms, {row.get('ratio', float('nan')):.3f} of DDP" if is_measured(row) else reason(row)
    )


def _blamed(error: GossamerError, methods: Sequence[str], always: Sequence[str]) -> dict[str, str]:
    """The method that an error is of, and what it was; nothing if it may be of any of several."""
    of = [error.method] if isinstance(error, MethodError) else methods
    return (
        {method: _last_line(error).rpartition(f"{method}: ")[2] for method in of} if len(of) == 1 or {*of} <= {*always} else {}
    )


def _last_line(error: GossamerError) -> str:
    """Of a traceback: the error itself."""
    return ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
