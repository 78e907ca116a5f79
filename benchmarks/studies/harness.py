"""Harness: what every study shares: rows in one file, its table, a command line, and measuring on emulated hosts."""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch.distributed as dist
from rich.console import Console

from gossamer.bench.clock import Clock
from gossamer.bench.conditions import busy_machine
from gossamer.bench.ratios import ENOUGH, SPREAD
from gossamer.bench.rows import Column, Record, Store, days, table
from gossamer.errors import GossamerError

RESULTS = Path("benchmarks/results")
AS_RANK = "--as-rank"

console = Console(stderr=True)


def measured_on(rows: Sequence[Record]) -> str:
    """The machines, versions and days of rows, as far as they tell."""
    told = [row for row in rows if "processor" in row]
    machines = sorted({f"{row['cores']} cores of {row['processor']}, PyTorch {row['torch']}" for row in told})
    return " ".join(filter(None, [f"{'; '.join(machines)}." if machines else "", days(rows)]))


@dataclass(frozen=True)
class Study:
    """What is kept of a study: rows in ``NAME.jsonl``, known by ``key``, and in ``NAME.md`` their table.

    ``columns``: of the rows as :attr:`shown` makes them (as they are, unless said). ``note``: what stands below the table.
    """

    name: str
    key: tuple[str, ...]
    columns: Callable[[Sequence[Record]], Sequence[Column]]
    shown: Callable[[Sequence[Record]], Sequence[Record]] = lambda rows: rows
    note: Callable[[Sequence[Record]], str] = measured_on

    def page(self, rows: Sequence[Record]) -> str:
        """The table of rows, and the note, as Markdown."""
        shown, note = self.shown(rows), self.note(rows)
        return "\n".join([*table(self.columns(rows), shown), *(["", note] if note else [])]) + "\n"

    def store(self, folder: Path) -> Store:
        """The rows that a folder has."""
        return Store(folder / f"{self.name}.jsonl", self.key)

    def write(self, folder: Path) -> None:
        """Make the table of a folder anew."""
        path = folder / f"{self.name}.md"
        path.write_text(self.page(self.store(folder).rows))
        console.log(f"wrote {path}")

    def main(
        self,
        parser: argparse.ArgumentParser,
        measure: Callable[[argparse.Namespace, Store], Iterable[Record]],
        arguments: Sequence[str] | None = None,
        on_ranks: Callable[[argparse.Namespace], Iterable[Record]] | None = None,
    ) -> None:
        """Measure, keeping every row as soon as it is there, and write the table of all, however it ends.

        ``measure`` may look into the store for what needs not be measured again. ``on_ranks``: what a rank does of a launch of
        this study with ``AS_RANK``: see :func:`as_rank`. Raises SystemExit with what went wrong.
        """
        if on_ranks is not None and AS_RANK in sys.argv:
            parser.add_argument(AS_RANK, action="store_true")
            as_rank(partial(on_ranks, parser.parse_args()))
            return
        parser.add_argument("--save-to", type=Path, default=RESULTS, help="folder for rows and table")
        parser.add_argument("--table-only", action="store_true", help="measure nothing: make the table anew")
        options = parser.parse_args(arguments)
        try:
            options.save_to.mkdir(parents=True, exist_ok=True)
            store = self.store(options.save_to)
            try:
                for row in () if options.table_only else _after_warnings(measure(options, store)):
                    store.add([row if "when" in row else row | {"when": round(time.time())}])
            finally:
                if store.rows:
                    self.write(options.save_to)
        except (GossamerError, OSError) as error:
            raise SystemExit(f"{self.name}: {error}") from None


def _after_warnings(measured: Iterable[Record]) -> Iterator[Record]:
    for warning in busy_machine():
        console.log(warning)
    yield from measured


def spread(rows: Sequence[Record]) -> str:
    """``SPREAD`` in the words that rows of so many rounds need."""
    return SPREAD if any(row["rounds"] < ENOUGH for row in rows) else SPREAD.partition(";")[0]


def seconds_of(work: Callable[[], object], clock: Clock, calls: int = 1) -> float:
    """Seconds per call: of one on the host; of a batch on a device, which works on one while the next is launched."""
    clock.finish()
    begin = clock.now()
    for _ in range(calls):
        work()
    end = clock.now()
    clock.finish()
    return clock.seconds(begin, end) / calls


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """A command line whose help is a module's documentation."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def as_rank(measure: Callable[[], Iterable[Record]]) -> None:
    """Measure as one rank of a launch, over Gloo; rank 0 prints what was found, one JSON object a line."""
    dist.init_process_group("gloo")
    for found in measure():
        if dist.get_rank() == 0:
            sys.stdout.write(json.dumps(found) + "\n")
            sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()
