"""Quality table: methods beside the first of them, by when each run reached its target."""

import statistics
from collections.abc import Sequence

from benchmarks.studies.crossing import Points, crossing, smoothed
from gossamer.bench.catalogue import find_workload
from gossamer.bench.peers import BASELINE
from gossamer.bench.rows import Column, Record, code, days, table, text
from gossamer.errors import ConfigurationError


def points(run: Record) -> Points:
    """Seconds and quality of each of its evaluations."""
    return [(seconds, quality) for _, seconds, quality in run["evaluations"]]


def seconds_to(run: Record, target: float) -> float | None:
    """Seconds of training until the target; None if the run ended before."""
    return crossing(points(run), target, run["measure"])


def target_after(run: Record, seconds: float) -> float:
    """The smoothed quality of a run at its last evaluation before ``seconds``. Raises ConfigurationError if it has none."""
    medians = [quality for when, quality in smoothed(points(run)) if when <= seconds]
    if not medians:
        raise ConfigurationError(f"{run['method']} has no five evaluations in {seconds:g} s: take a smaller --eval-every")
    return medians[-1]


def compared(rows: Sequence[Record], targets: dict[int, float]) -> list[Record]:
    """Every method beside the first one, over all seeds that have a target: what the table shows."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    times = {method: _times([row for row in rows if row["method"] == method], targets) for method in methods}
    paces = {method: {row["seed"]: _pace(row) for row in rows if row["method"] == method} for method in methods}
    first, lines = methods[0], []
    for method in methods:
        own, reached = paces[method], times[method]
        faster = {seed: times[first][seed] / taken for seed, taken in reached.items() if seed in times[first]}
        alone = paces.get(BASELINE, {}) | {
            row["seed"]: statistics.median(row["alone"]) for row in rows if row["method"] == method and "alone" in row
        }
        possible = {seed: paces[first][seed] / pace for seed, pace in alone.items() if seed in paces[first]}
        line = {"method": method, "pace": f"{1e3 * statistics.median(own.values()):.0f}"}
        if method == BASELINE:
            lines.append(line | {"faster": f"at most {_spread(list(possible.values()), '{:.2f}')}", "share": "1"})
            continue
        beside = [1e3 * pace for seed, pace in alone.items() if seed in own]
        line |= {"seeds": f"{len(reached)} of {len(own)}", "alone": _spread(beside, "{:.0f}")}
        line |= {"steps": _spread([seconds / own[seed] for seed, seconds in reached.items()], "{:.0f}")}
        line |= {"seconds": _spread(list(reached.values()), "{:.1f}") or "not reached"}
        line |= {"faster": _spread(list(faster.values()), "{:.2f}")}
        shares = [each / possible[seed] for seed, each in faster.items() if seed in possible]
        lines.append(line | {"share": _spread(shares, "{:.2f}")})
    return lines


ALONE = Column("ms without communication, beside", text("alone"))
SHARE = Column("share of the speed-up that is possible without communication", text("share"))
COLUMNS = (
    Column("method", code("method")),
    Column("seeds", text("seeds")),
    Column("ms per step", text("pace")),
    ALONE,
    Column("steps to the target", text("steps")),
    Column("seconds to the target", text("seconds")),
    Column("speed-up over the first", text("faster")),
    SHARE,
)


def lines_of(rows: Sequence[Record], targets: dict[int, float]) -> list[str]:
    """The table, as Markdown, without columns in which nothing stands."""
    shown = compared(rows, targets)
    empty = set() if any("alone" in row for row in rows) else {ALONE}
    empty |= set() if any(line.get("share") for line in shown) else {SHARE}
    return table([column for column in COLUMNS if column not in empty], shown)


def _pace(row: Record) -> float:
    """Seconds per step."""
    steps, seconds, _ = row["evaluations"][-1]
    return float(seconds / steps)


def _times(rows: Sequence[Record], targets: dict[int, float]) -> dict[int, float]:
    """Seconds to the target, by seed, where it was reached."""
    found = {row["seed"]: seconds_to(row, targets[row["seed"]]) for row in rows if row["seed"] in targets}
    return {seed: seconds for seed, seconds in found.items() if seconds is not None}


def _spread(values: Sequence[float], form: str) -> str:
    """The median, and the least and the most of several."""
    if not values:
        return ""
    middle, low, high = (form.format(each) for each in (statistics.median(values), min(values), max(values)))
    return middle if len(values) == 1 else f"{middle} ({low} to {high})"


def page(rows: Sequence[Record], targets: dict[int, float]) -> list[str]:
    """What was trained, and the table, as lines."""
    first, stated = rows[0], sorted(targets.values())
    target = f"{stated[0]:.4g}" if stated[0] == stated[-1] else f"{stated[0]:.4g} to {stated[-1]:.4g}, by seed"
    name = find_workload(first["workload"]).name
    about = f"{name}, {first['hosts']} hosts, {first['network']}: {first['measure']} {target}"
    return [about, "", *lines_of(rows, targets), "", days(rows)]
