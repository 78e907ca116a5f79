"""Session: cases measured one after the other: what is there is left alone, and what fails takes nothing else along."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.progress import Progress

from gossamer.bench.in_lab import Record
from gossamer.bench.matrix import ALWAYS, Case, Turns, is_measured, portions, reason, without_figures
from gossamer.bench.memory import FIGURES
from gossamer.bench.results import Results
from gossamer.bench.rows import days
from gossamer.bench.trained import SideError
from gossamer.errors import GossamerError
from gossamer.lab import LabError


@dataclass(frozen=True, slots=True)
class Plan:
    """What is measured of every case."""

    sides: Sequence[str]
    turns: Turns
    at_once: int
    memory: bool
    again: bool


@dataclass(frozen=True, slots=True)
class Place:
    """Where it is measured: in the lab, or where these ranks are. All is called on all ranks."""

    conditions: Callable[[], Mapping[str, Any]]
    """What a row would tell of this place."""
    warnings: Callable[[], list[str]]
    """Why figures would not be good now."""
    absent: Callable[[Case, Sequence[str]], list[Record]]
    """Rows of sides that need not be tried, because they cannot run."""
    measure: Callable[[Case, Sequence[str], Turns, Callable[[Record], None]], list[Record]]
    memory: Callable[[Case, Sequence[str]], dict[str, Record]]
    separate: bool
    """Whether each is measured in processes of its own, and one that fails leaves the next unharmed."""


class Session:
    """Measures what is lacking, and keeps it as soon as it is there."""

    def __init__(self, place: Place, plan: Plan, results: Results, progress: Progress) -> None:
        self._place, self._plan, self._results, self._progress = place, plan, results, progress

    def run(self, cases: Sequence[Case]) -> None:
        """Measure all cases. Raises GossamerError that tells all that failed, at the end if the others could go on."""
        failed: list[str] = []
        self._say(self._place.warnings())
        conditions = self._place.conditions()
        for case in cases:
            self._say(self._known(case, conditions))
            failed += self._each(case, self._lacking(case), self._time, always=ALWAYS)
            if self._plan.memory:
                failed += self._each(case, self._unweighed(case), self._weigh)
        if failed:
            raise GossamerError("what was measured is kept; this failed:\n" + "\n".join(failed))

    def _known(self, case: Case, conditions: Mapping[str, Any]) -> list[str]:
        """What is there already, and what of it was otherwise when it was measured."""
        there = [] if self._plan.again else list(self._results.there(case, self._plan.turns).items())
        rows = [row for side, row in there if side in self._plan.sides]
        if not rows:
            return []
        told = f"{case}: {len(rows)} of {len(self._plan.sides)} sides are there; --again measures them anew. {days(rows)}"
        others = {name: [row[name] for row in rows if row.get(name, now) != now] for name, now in conditions.items()}
        differ = [f"{name} {_short(other[0])} → {_short(conditions[name])}" for name, other in others.items() if other]
        return [told.strip(), *([f"Changed since: {'; '.join(differ)}"] if differ else [])]

    def _lacking(self, case: Case) -> list[list[str]]:
        """The portions to time; what failed before comes last, each by itself."""
        plan, results = self._plan, self._results
        wanted = list(plan.sides) if plan.again else results.lacking(case, plan.sides, plan.turns)
        missing = self._place.absent(case, wanted)
        results.add(missing)
        self._log(case, missing)
        absent = {row["side"] for row in missing}
        before = results.failed(case)
        fresh = [side for side in wanted if side not in absent | before]
        tried = [side for side in wanted if side in before - absent]
        made = [*portions(fresh, plan.at_once), *(portions(tried, 1) if tried else [])]
        return [each for each in made if plan.again or results.lacking(case, each, plan.turns)]

    def _unweighed(self, case: Case) -> list[list[str]]:
        """The portions of timed sides whose memory is not known."""
        plan, results = self._plan, self._results
        rows = {side: row for side, row in results.there(case, plan.turns).items() if side in {*ALWAYS, *plan.sides}}
        known = {} if plan.again else results.memory(case)
        results.add([row | known[side] for side, row in rows.items() if side in known and FIGURES[0] not in row])
        sides, size = [side for side in rows if side not in known], plan.at_once + len(ALWAYS)
        return [sides[start : start + size] for start in range(0, len(sides), size)]

    def _each(
        self, case: Case, waiting: Sequence[list[str]], work: Callable[[Case, list[str]], None], always: Sequence[str] = ()
    ) -> list[str]:
        """Do ``work`` for every portion; one that fails is taken apart, and what then fails is returned, in words."""
        failed, left = [], deque(waiting)
        while left:
            portion = left.popleft()
            own = [side for side in portion if side not in always]
            try:
                work(case, portion)
            except LabError:  # no other portion will run here either
                raise
            except GossamerError as error:
                apart = [[*always, side] for side in own] if self._place.separate and len(own) > 1 else []
                if always and not apart:
                    self._results.add(without_figures(case, "failed", _blamed(error, own or portion)))
                if not self._place.separate:
                    raise
                told = f"{case}, {', '.join(portion)}: "
                self._say([told + _last_line(error), *(["each of these sides is measured by itself now"] if apart else [])])
                left.extendleft(reversed(apart))
                failed += [] if apart else [told + str(error)]
        return failed

    def _time(self, case: Case, portion: list[str]) -> None:
        """Time sides that share a run; what is known of their memory stays."""
        turns = self._plan.turns
        with self._bar(f"{case}: {len(portion)} sides", turns.rounds) as note:
            rows = self._place.measure(case, portion, turns, note)
        known = self._results.memory(case)
        self._results.add([row | known.get(row["side"], {}) for row in rows])
        self._log(case, rows)

    def _weigh(self, case: Case, portion: list[str]) -> None:
        """Measure the memory of sides that have been timed."""
        with self._bar(f"{case}: memory of {len(portion)} sides", None):
            found = self._place.memory(case, portion)
        there = self._results.there(case, self._plan.turns)
        self._results.add([there[side] | found[side] for side in portion if side in found])

    @contextmanager
    def _bar(self, what: str, total: int | None) -> Iterator[Callable[[Record], None]]:
        bar = self._progress.add_task(what, total=total)

        def note(record: Record) -> None:
            if "round" in record:
                self._progress.update(bar, completed=record["round"])

        try:
            yield note
        finally:
            self._progress.remove_task(bar)

    def _log(self, case: Case, rows: Sequence[Record]) -> None:
        self._say([f"{case}: {row['side']} {_found(row)}" for row in rows])

    def _say(self, lines: Sequence[str]) -> None:
        for line in () if self._progress.disable else lines:
            self._progress.log(line, markup=False)


def _found(row: Record) -> str:
    return f"{1e3 * row['step_seconds']:.1f} ms, {row['ratio']:.3f} of DDP" if is_measured(row) else reason(row)


def _blamed(error: GossamerError, sides: Sequence[str]) -> dict[str, str]:
    """The side that an error is of, and what it was; nothing if it may be of any of several."""
    of = [error.side] if isinstance(error, SideError) else sides
    return {side: _last_line(error).rpartition(f"{side}: ")[2] for side in of} if len(of) == 1 or {*of} <= {*ALWAYS} else {}


def _last_line(error: GossamerError) -> str:
    """Of a traceback: the error itself."""
    return ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1]


def _short(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
