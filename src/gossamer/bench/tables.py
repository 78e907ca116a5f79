"""Tables and pictures of the rows of ``gossamer bench``."""

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gossamer.bench.cases import ALWAYS, REFERENCE, case_of, is_measured
from gossamer.bench.catalogue import is_of
from gossamer.bench.peers import BASELINE, PEERS
from gossamer.bench.plots import Bars, Panel, times_by_method, times_over_hosts
from gossamer.bench.ratios import SPREAD
from gossamer.bench.rows import Column, Record, code, day, markdown, milliseconds, number, table, text

NOISY = 0.05
"""Half-width of a ratio's interval (or range) from which a row is called noisy."""

ROUNDS, STEP, BOUND = "rounds of steps", "ms per step", "step / bound"
RATIO, TO_COMPUTE, PAYLOAD, MEMORY = f"relative to DDP ({SPREAD})", "relative to compute", "payload, MB", "memory / gradients"


def of_rows(rows: Sequence[Record]) -> list[str]:
    """Markdown: every row, grouped by case. Cells of what a row does not tell are empty.

    Ratios are those of the row's own run; rows of a case may be of several, each with a ``ddp`` and a ``compute`` of its own.
    """
    order = {case: place for place, case in enumerate(dict.fromkeys(map(case_of, rows)))}
    return table(COLUMNS, sorted(aged(rows), key=lambda row: order[case_of(row)]))


def aged(rows: Sequence[Record]) -> list[Record]:
    """The rows, each saying whether it is ``older`` than the version of its workload's file that was measured last."""
    newest = newest_files(rows)
    return [row | {"older": not is_of(row, newest.get(row["workload"]))} for row in rows]


def newest_files(rows: Sequence[Record]) -> dict[str, str]:
    """By workload, the version of its file that was measured last."""
    return {row["workload"]: row["digest"] for row in sorted(rows, key=lambda row: row.get("when", 0)) if row.get("digest")}


def overview(rows: Sequence[Record], shown: str) -> list[str]:
    """Markdown: the column that is called ``shown``, methods by cases, whichever there are fewer of across."""
    cell = next(column.cell for column in COLUMNS if column.title.startswith(shown))
    rows = [row for row in aged(rows) if not row["older"] and (is_measured(row) or "missing" in row)]
    cases, methods = (list(dict.fromkeys(each)) for each in (map(case_of, rows), (row["method"] for row in rows)))
    names = {case: f"{row['name']}, {case.network}, {case.hosts} hosts" for row in rows for case in [case_of(row)]}
    cells = {(case_of(row), row["method"]): _brief(cell(row)) if is_measured(row) else "not run" for row in rows}
    methods = [method for method in methods if any(cells.get((case, method)) not in (None, "", "not run") for case in cases)]
    if len(methods) < len(cases):
        lines = [[names[case], *(cells.get((case, method), "") for method in methods)] for case in cases]
        return markdown([shown, *(f"`{method}`" for method in methods)], lines)
    lines = [[f"`{method}`", *(cells.get((case, method), "") for case in cases)] for method in methods]
    return markdown([shown, *names.values()], lines)


def _brief(cell: str) -> str:
    """A figure without its spread."""
    return cell.partition(" (")[0].partition(" ±")[0]


def figure(cell: Callable[[Record], str]) -> Callable[[Record], str]:
    """The cell of a row that has figures; empty of another."""
    return lambda row: cell(row) if is_measured(row) else ""


def reason(row: Record) -> str:
    """Why a row has no figures, on one line."""
    told = f"not run: {row['missing']}" if "missing" in row else f"failed: {row['failed']}"
    return " ".join(told.split())


def _rounds(row: Record) -> str:
    return f"{row['rounds']} of {row['timed_steps']}" if "timed_steps" in row else str(row["rounds"])


def _to_ddp(row: Record) -> str:
    if not is_measured(row):
        return reason(row)
    return "1" if row["method"] == REFERENCE and "ratio" in row else _ratio(row, "ratio")


def _ratio(row: Record, name: str) -> str:
    """A ratio with its spread, as far as the row tells."""
    if name not in row:
        return ""
    ratio, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return f"{ratio:.3f}"
    return f"{ratio:.3f} ({low:.3f} to {high:.3f})" + (" (noisy)" if high - low > 2 * NOISY * ratio else "")


def _bounds(row: Record, form: Callable[[float], str]) -> str:
    """The figure of a bound, and if there is one that of what the model's layers allow."""
    bounds = [row[name] for name in ("bound_seconds", "layered_bound_seconds") if row.get(name) is not None]
    texts = list(map(form, bounds))
    return f"{texts[0]} (layer by layer {texts[1]})" if len(texts) > 1 else "".join(texts)


def _payload(row: Record) -> str:
    """What a row says of its payload; nothing where nobody knows it (old rows have a zero there)."""
    known = row["method"] not in PEERS or PEERS[row["method"]].payload is not None
    return megabytes(row["payload_bytes"]) if known else ""


def megabytes(nbytes: float | None) -> str:
    """For a table; nothing for what nobody knows."""
    return "" if nbytes is None else f"{nbytes / 1e6:.2f}"


def _memory(row: Record) -> str:
    """The peak beyond ``compute``, with its noise, unless it is zero by definition."""
    if "memory" not in row or row["method"] == BASELINE:
        return ""
    return f"{row['memory']:.2f} ± {row['memory_noise']:.2f}"


def _undelayed(row: Record) -> str:
    return " (not delayed)" if row.get("runner_latency") and row["method"] in PEERS else ""


def _of_ours(name: str) -> Callable[[Record], str]:
    return figure(lambda row: milliseconds(name)(row) if row["wire_seconds"] else "")


COLUMNS = (
    Column("workload", lambda row: row["name"] + (" (another version of its file)" if row["older"] else "")),
    Column("network", lambda row: row["network"] + _undelayed(row)),
    Column("hosts", text("hosts")),
    Column("method", code("method")),
    Column(ROUNDS, figure(_rounds)),
    Column(STEP, figure(lambda row: milliseconds("step_seconds")(row) + (" (two phases)" if row.get("two_phases") else ""))),
    Column(RATIO, _to_ddp),
    Column(TO_COMPUTE, figure(lambda row: "1" if row["method"] == BASELINE else _ratio(row, "ratio_to_compute"))),
    Column("bound, ms", figure(lambda row: _bounds(row, lambda bound: f"{1e3 * bound:.1f}"))),
    Column(BOUND, figure(lambda row: _bounds(row, lambda bound: f"{row['step_seconds'] / bound:.3f}"))),
    Column(PAYLOAD, figure(_payload)),
    Column("on the wire, MB", figure(number("interface_bytes", "{:.2f}", 1e-6))),
    Column("communication, ms", _of_ours("wire_seconds")),
    Column("exposed, ms", _of_ours("exposed_seconds")),
    Column("CPU, ms", figure(milliseconds("cpu_seconds"))),
    Column(MEMORY, figure(_memory)),
    Column("measured", lambda row: day(row["when"]) if "when" in row else ""),
)


def draw(rows: Sequence[Record], folder: Path) -> list[Path]:
    """Pictures for every workload: of step times over the number of hosts on networks with several, on others by method.

    Of the version of its file that was measured last.
    """
    rows = [row for row in aged(rows) if is_measured(row) and not row["older"]]
    by_workload = {row["workload"]: [each for each in rows if each["workload"] == row["workload"]] for row in rows}
    return [path for own in by_workload.values() for path in _draw(own, folder)]


def _draw(rows: Sequence[Record], folder: Path) -> Iterator[Path]:
    """The pictures of one workload."""
    stem, name = re.sub(r"[^A-Za-z0-9]+", "-", rows[0]["workload"]).strip("-").lower(), rows[0]["name"]
    networks = {row["network"]: [each for each in rows if each["network"] == row["network"]] for row in rows}
    panels = {network: panel for network, own in networks.items() if (panel := _over_hosts(network, own)) is not None}
    if panels:
        path = folder / f"{stem}-hosts.png"
        times_over_hosts(path, list(panels.values()), title=f"{name}: step time over the number of hosts")
        yield path
    others = {network: own for network, own in networks.items() if network not in panels}
    if others:
        path, hosts = folder / f"{stem}-methods.png", sorted({row["hosts"] for own in others.values() for row in own})
        counted = f"{' or '.join(map(str, hosts))} host{'s' if hosts != [1] else ''}"
        times_by_method(path, [_by_method(*each) for each in others.items()], title=f"{name}, {counted}: step time")
        yield path


def _over_hosts(network: str, rows: Sequence[Record]) -> Panel | None:
    """None if no method was measured with several numbers of hosts."""
    seconds: dict[str, dict[int, float]] = {}
    bounds: dict[str, dict[int, float]] = {}
    for row in rows:
        seconds.setdefault(row["method"], {})[row["hosts"]] = row["step_seconds"]
        if row.get("bound_seconds") is not None and row["method"] != BASELINE:
            bounds.setdefault(row["method"], {})[row["hosts"]] = row["bound_seconds"]
    return Panel(network, seconds, bounds) if max(map(len, seconds.values())) > 1 else None


def _by_method(network: str, rows: Sequence[Record]) -> Bars:
    """First what every case has, then the others as they were measured."""
    rows = sorted(rows, key=lambda row: row["method"] not in ALWAYS)
    seconds = {row["method"]: row["step_seconds"] for row in rows}
    bounds = {row["method"]: row["bound_seconds"] for row in rows if "bound_seconds" in row}
    return Bars(network, seconds, bounds, ours=seconds.keys() - PEERS.keys())
