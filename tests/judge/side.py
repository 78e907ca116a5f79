"""One side of the comparison: runs torch's tests with what ``JUDGE`` names in DDP's place; a line of JSON per test.

JUDGE=gossamer python -m judge.side [NAME …]
"""

import json
import os
import re
import sys
import time
import unittest

from judge.cases import Case, names
from judge.reasons import TOO_LONG


def outcome(name: str) -> dict[str, str | float]:
    """What became of a test, and why."""
    result, begin = unittest.TestResult(), time.monotonic()
    Case(name).run(result)
    trouble = [text for _, text in (*result.errors, *result.failures)]
    if result.skipped:
        return {"name": name, "end": "skipped", "why": result.skipped[0][1], "seconds": time.monotonic() - begin}
    why = last_error(trouble[0]) if trouble else ""
    return {"name": name, "end": "failed" if trouble else "passed", "why": why, "seconds": time.monotonic() - begin}


def last_error(text: str) -> str:
    """The last line of a traceback that names an error of a test's own process."""
    lines = [line for line in text.splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Timeout|Exit)\b", line)]
    return " ".join((lines or text.splitlines() or [""])[-1].split())[:300]


if __name__ == "__main__":
    for each in sys.argv[1:] or [name for name in names() if name not in TOO_LONG]:
        print(json.dumps(outcome(each) | {"side": os.environ["JUDGE"]}), flush=True)
