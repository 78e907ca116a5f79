"""How a case is executed: in loopback, or in real processes; with a limit of time, and an eye on what stays behind."""

import gc
import os
import tempfile
import threading
import traceback
import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gossamer
from fuzz.cases import Case, sensible, simpler
from fuzz.laws import LAWS, a_resumed_run_ends_with_the_same_bits
from fuzz.loops import trained
from gossamer.errors import ConfigurationError

REFUSED = "refused"
"""What :func:`check` says of a case that ``replicate()`` refuses with a reason: no matrix for PowerSGD, say."""

SECONDS = 200
"""Within which a case has to end."""


def check(case: Case) -> str:
    """Run a case in loopback and say which law it breaks; nothing if it keeps them all."""
    found: list[str] = []

    def body() -> None:
        found.append(_checked(case))

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    for _ in range(SECONDS):  # one at a time: a process that is stopped meanwhile, for a measurement, has not hung
        thread.join(1.0)
    return found[0] if found else f"no_hang: it has not ended after {SECONDS} s"


def _checked(case: Case) -> str:
    replicas: list[weakref.ref[gossamer.Replica]] = []

    def replicate(*arguments: Any, **options: Any) -> gossamer.Replica:
        replica = gossamer.replicate(*arguments, **options)
        replicas.append(weakref.ref(replica))
        return replica

    before = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    with tempfile.TemporaryDirectory(prefix="gossamer-fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            runs = [
                gossamer.loopback(lambda rank, again=again: trained(case, rank, Path(folder), replicate, again), case.world)
                for again in ([False, True] if case.resume else [False])
            ]
        except ConfigurationError as error:
            if type(error) is ConfigurationError and not replicas:
                return REFUSED
            return f"it_runs: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
        except Exception as error:
            return f"it_runs: {type(error).__name__}: {error}\n{traceback.format_exc(limit=-6)}"
    broken = broken_by(case, runs)
    del runs
    gc.collect()
    after = (threading.active_count(), len(os.listdir("/proc/self/fd")))
    if not broken and after > before:
        return f"no_growth: threads and files {before} became {after}"
    if not broken and any(replica() is not None for replica in replicas):
        return "no_growth: a closed replica is still held by something"
    return broken


def broken_by(case: Case, runs: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Which law the results break: those of an uninterrupted run, and perhaps of a resumed one."""
    for law in LAWS:
        for results in runs:
            if results is runs[0] and (text := law(case, results)):
                return f"{law.__name__}: {text}"
    if len(runs) > 1 and (text := a_resumed_run_ends_with_the_same_bits(case, *runs)):
        return f"{a_resumed_run_ends_with_the_same_bits.__name__}: {text}"
    return ""


def smallest(case: Case, broken: str) -> tuple[Case, str]:
    """A case that breaks the same law and has nothing that could be left out, and how it breaks it."""
    law = broken.split(":")[0]
    for _ in range(40):
        for other in simpler(case):
            if sensible(other) and (text := check(other)).startswith(law):
                case, broken = other, text
                break
        else:
            break
    return case, broken


def in_processes(cases: Sequence[Case], timeout: float) -> list[str]:
    """The same for cases of one world in one launch of real processes; what is resumed, in another one."""
    from processes.harness import launch

    world = cases[0].world
    assert all(case.world == world for case in cases)
    runs: list[list[list[Any]]] = []
    with tempfile.TemporaryDirectory(prefix="gossamer-fuzz-") as folder:
        for again in (False, True):
            chosen = [case for case in cases if case.resume or not again]
            if not chosen:
                continue
            given = {"seeds": ",".join(str(case.seed) for case in chosen), "again": str(int(again)), "folder": folder}
            ended = launch("scenarios_fuzz", ["cases"], world, timeout=timeout, arguments=given)
            reports = [process.reports.get("cases") for process in ended]
            values = [report.value if report is not None and report.value is not None else {} for report in reports]
            errors = " | ".join(process.errors[-1500:] for process in ended if process.errors)
            for case in cases:
                lacking = {"error": f"no report; {errors}"}
                found = [value.get(case.seed, lacking) for value in values] if case in chosen else []
                runs.append([[case.seed, again], found])
    told = []
    for case in cases:
        mine = [found for (seed, _), found in runs if seed == case.seed and found]
        failed = [f"rank {r}: {each['error']}" for found in mine for r, each in enumerate(found) if "error" in each]
        if case.make_algorithm().cadence.lag:
            mine = mine[:1]  # who takes part in which exchange depends on the time that each rank takes
        refused = bool(failed) and all("ConfigurationError: " in text and "/gossamer/replicate.py" in text for text in failed)
        told.append(REFUSED if refused else f"it_runs: {failed[0]}" if failed else broken_by(case, mine))
    return told
