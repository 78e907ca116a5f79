"""Trace: what happens in one simulated step, as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

LINKS = ("link across sites", "link between machines", "link inside a machine")
ROWS = ("compute", "waiting", "codecs and copies", *LINKS)
"""Rows of the trace, from above."""


class Span(NamedTuple):
    """Something that took from ``begin`` to ``end``, in seconds of virtual time."""

    row: str
    name: str
    begin: float
    end: float


@dataclass
class Spans:
    """What has happened on one worker, and when its steps began."""

    spans: list[Span] = field(default_factory=list)
    steps: list[float] = field(default_factory=list)

    def add(self, row: str, name: str, begin: float, end: float) -> None:
        """Something has ended. What takes no time is left out."""
        if end > begin:
            self.spans.append(Span(row, name, begin, end))

    def whole_step(self) -> tuple[float, float, list[Span]]:
        """When the last step but one begins and ends, and what happens in it, cut at its ends: what goes on after the last
        one is not known."""
        begin, end = self.steps[-3:-1]
        inside = [span for span in self.spans if span.end > begin and span.begin < end]
        return begin, end, [span._replace(begin=max(begin, span.begin), end=min(end, span.end)) for span in inside]


_collecting: ContextVar[Spans | None] = ContextVar("collecting", default=None)


@contextmanager
def collecting() -> Iterator[Spans]:
    """Inside, simulated workers tell what they do."""
    spans = Spans()
    token = _collecting.set(spans)
    try:
        yield spans
    finally:
        _collecting.reset(token)


def is_collecting() -> bool:
    """Whether anyone asks what happens."""
    return _collecting.get() is not None


def tell(row: str, name: str, begin: float, end: float) -> None:
    """Something has ended, if anyone asks."""
    if (spans := _collecting.get()) is not None:
        spans.add(row, name, begin, end)


def tell_step(moment: float) -> None:
    """A step begins, or the last one ends."""
    if (spans := _collecting.get()) is not None:
        spans.steps.append(moment)


def write_trace(path: Path, title: str, spans: Spans) -> None:
    """Write one whole step."""
    begin, _, inside = spans.whole_step()
    path.write_text(json.dumps({"displayTimeUnit": "ms", "traceEvents": list(_events(title, begin, inside))}) + "\n")


def _events(title: str, begin: float, spans: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Complete events, in microseconds. In a row of a trace nothing may overlap: what does gets a row of its own below."""
    yield {"ph": "M", "name": "process_name", "pid": 1, "args": {"name": title}}
    number = 0
    for row in ROWS:
        for place, line in enumerate(_without_overlap([span for span in spans if span.row == row])):
            number += 1
            named = row if place == 0 else f"{row} ({place + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": 1, "tid": number, "args": {"name": named}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": number, "args": {"sort_index": number}}
            for span in line:
                when = {"ts": 1e6 * (span.begin - begin), "dur": 1e6 * (span.end - span.begin)}
                yield {"ph": "X", "name": span.name, "cat": row, "pid": 1, "tid": number, **when}


def _without_overlap(spans: Sequence[Span]) -> list[list[Span]]:
    lines: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: span.begin):
        free = next((line for line in lines if line[-1].end <= span.begin + 1e-12), None)
        if free is None:
            lines.append(free := [])
        free.append(span)
    return lines
