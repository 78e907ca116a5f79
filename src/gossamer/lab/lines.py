"""Line: what one rank writes, never mixed with another's."""

from __future__ import annotations

import re
from collections import deque

_END = re.compile(rb"\r\n|\n|\r(?!$)")  # a \r at the very end may be half of \r\n
_LONGEST = 1 << 22  # a benchmark hands over its result as one line
_TRACEBACK = "Traceback (most recent call last):"
_CHAINED = ("During handling of the above exception", "The above exception was the direct cause")
_KEPT = 200


class LineSplitter:
    """Cuts a byte stream into lines; progress bars, which end lines in \\r, included."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[str]:
        """The lines which `data` completes."""
        *lines, self._rest = _END.split(self._rest + data)
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest], b""
        return [_text(line) for line in lines]

    def flush(self) -> list[str]:
        """The line that the stream ended in the middle of, if any."""
        rest, self._rest = self._rest.removesuffix(b"\r"), b""
        return [_text(rest)] if rest else []


class ErrorTail:
    """The last lines of a rank's stderr, for its traceback."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_KEPT)
        self.traceback_at: float | None = None  # when the last traceback began, in seconds of the caller's clock

    def add(self, line: str, now: float) -> None:
        """Remember a line."""
        self._lines.append(line)
        if _TRACEBACK in line:
            self.traceback_at = now

    def traceback(self) -> str:
        """The last traceback with the exceptions chained to it, or the last 20 lines where there is none."""
        lines = list(self._lines)
        starts = [index for index, line in enumerate(lines) if _TRACEBACK in line]
        if not starts:
            return "\n".join(lines[-20:])
        start = starts.pop()
        while starts and any(phrase in line for line in lines[starts[-1] : start] for phrase in _CHAINED):
            start = starts.pop()
        return "\n".join(lines[start:])


def _text(line: bytes) -> str:
    return line.decode(errors="replace")
