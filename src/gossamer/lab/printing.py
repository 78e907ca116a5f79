"""Rank printer: every rank's lines with its number before them, and the outcome."""

from __future__ import annotations

import signal
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from gossamer.lab.result import LabResult
    from gossamer.lab.spec import LabSpec

_COLOURS = (36, 33, 35, 32, 34, 31)  # of ANSI terminals; ranks take turns


class RankPrinter:
    """Prints whole lines only, stdout to stdout and stderr to stderr, in colour on a terminal."""

    def __init__(self, spec: LabSpec) -> None:
        self._spec = spec
        self._width = len(str(spec.world - 1))

    def line(self, rank: int, stream: str, line: str) -> None:
        """Print one line of a rank."""
        out = sys.stdout if stream == "stdout" else sys.stderr
        prefix = _coloured(out, _COLOURS[rank % len(_COLOURS)], f"[rank {rank:{self._width}}]")
        _write(out, f"{prefix} {line}")

    def note(self, text: str) -> None:
        """Print one line of the lab's own."""
        _write(sys.stderr, f"{_coloured(sys.stderr, 1, '[lab]')} {text}")

    def result(self, result: LabResult) -> None:
        """Print what went wrong, if anything did: the first failing rank's traceback, last."""
        if result.timed_out:
            self.note(f"ended after the timeout of {self._spec.timeout:g} s")
        if result.failed_rank is None:
            return
        for line in result.traceback.splitlines():
            self.line(result.failed_rank, "stderr", line)
        self.note(f"rank {result.failed_rank} on host {result.failed_host} failed with {_code(result.exit_code)}")


def _code(code: int) -> str:
    names = {128 + number: number.name for number in signal.Signals}
    return f"exit code {code}" + (f" ({names[code]})" if code in names else "")


def _coloured(out: TextIO, colour: int, text: str) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if out.isatty() else text


def _write(out: TextIO, line: str) -> None:
    out.write(line + "\n")
    out.flush()
