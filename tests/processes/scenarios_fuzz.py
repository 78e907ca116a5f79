"""Scenario: cases of the fuzzer, one after the other, in real processes."""

import traceback
import warnings
from pathlib import Path
from typing import Any

from fuzz.cases import draw
from fuzz.loops import trained
from processes.worker import Here, meet, threads


def cases(here: Here) -> dict[int, Any]:
    """What every case left on this rank, by its seed, or the error that ended it."""
    found: dict[int, Any] = {}
    again, folder = here.argument("again") == "1", Path(here.argument("folder"))
    counts: list[int] = []
    for seed in map(int, here.argument("seeds").split(",")):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found[seed] = trained(draw(seed), here.rank, folder / str(seed), here.replicate, again)
        except Exception as error:
            text = f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
            found[seed] = {"error": text}
        here.close()
        counts.append(len(threads()))
        if len(counts) > 3 and counts[-1] > counts[2] + 4:
            found[seed] = {"error": f"no_growth: threads after each case: {counts}"}
        meet(here.rank, here.world, f"fuzz-{seed}-{again}")
    return found
