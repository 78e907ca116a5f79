"""Tracing: a few steps as a Chrome trace, and which rank the others wait for."""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gossamer.comm.runner import Runner, alarming
from gossamer.engine.agreement import values_of_all
from gossamer.engine.assembly import Parts

MAIN, LANE = "training loop", "gossamer lane"


@contextmanager
def traced(path: str | os.PathLike[str], runner: Runner) -> Iterator[Path]:
    """Record what runs inside with ``torch.profiler``, in all threads, and write it to a file of this rank."""
    place = Path(path)
    if runner.world > 1:
        place = place.with_name(f"{place.stem}.rank{runner.rank}{place.suffix or '.json'}")
    everything = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    with torch.profiler.profile(experimental_config=everything) as profile:
        yield place
    place.parent.mkdir(parents=True, exist_ok=True)
    profile.export_chrome_trace(str(place))
    place.write_text(json.dumps(named(json.loads(place.read_text()), runner.rank)))


def named(trace: dict[str, Any], rank: int) -> dict[str, Any]:
    """A trace of the profiler with this rank's name on the process, and with lanes named, which it knows by numbers only."""
    events = [event for event in trace["traceEvents"] if event.get("name") != "process_name" or event.get("ph") != "M"]
    own = [event for event in events if str(event.get("name", "")).startswith("gossamer: ")]
    waiting = {_thread(event) for event in own if event["name"].startswith("gossamer: wait of ")}
    names = {_thread(event): MAIN if _thread(event) in waiting else LANE for event in own}
    kept = [event for event in events if event.get("name") != "thread_name" or _thread(event) not in names]
    for pid in {pid for pid, _ in names} or {os.getpid()}:
        kept.append({"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": f"rank {rank}"}})
    for (pid, tid), name in names.items():
        kept.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}})
    return trace | {"traceEvents": kept}


def _thread(event: Mapping[str, Any]) -> tuple[Any, Any]:
    return event.get("pid"), event.get("tid")


@dataclass(frozen=True)
class Stragglers:
    """Per rank and step, in seconds: which rank the others wait for. Printed, it is one sentence."""

    compute_seconds: tuple[float, ...]
    """What the training loop took without standing still for communication."""
    ready_seconds: tuple[float, ...]
    """How long each rank stood ready for its exchanges before the last one did (0 for that one)."""

    @property
    def last(self) -> int:
        """The rank that was ready last."""
        return min(range(len(self.ready_seconds)), key=self.ready_seconds.__getitem__)

    def __str__(self) -> str:
        others = [seconds for rank, seconds in enumerate(self.ready_seconds) if rank != self.last]
        if not others:
            return "one rank waits for nobody"
        median = sorted(self.compute_seconds)[len(others) // 2]
        return (
            f"rank {self.last} was ready last: the others wait for it {min(others):.3f} to {max(others):.3f} s a step "
            f"(it computes {self.compute_seconds[self.last]:.3f} s, the median is {median:.3f} s)"
        )


class Traced:
    """What a replica shows of its exchanges: a base of :class:`gossamer.Replica`."""

    _runner: Runner
    _parts: Parts
    _before: Mapping[str, float] = {}
    """The counters as of the last report on stragglers."""

    @property
    def step(self) -> int:
        """The number of steps."""
        raise NotImplementedError

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[Path]:
        """Record the steps inside as a Chrome trace, which Perfetto and ``chrome://tracing`` open; a few steps are enough.

        Each rank writes its own file (``trace.json`` becomes ``trace.rank0.json``), whose path is the value of the block. It
        shows computation, and per bucket its flow in a lane, the part of that on the wire (the rest is encoding and decoding),
        and where the training loop waited. Recording slows down the steps. Needs no other rank.
        """
        with traced(path, self._runner) as place:
            yield place

    def stragglers(self) -> Stragglers:
        """Which rank the others wait for, since the last call: how long each was ready for its exchanges before the last one,
        per step. Collective; the means of some ten steps tell more than those of one.
        """
        now = {**self._parts.statistics.totals(), "step": float(self.step)}
        took = {name: now[name] - self._before.get(name, 0.0) for name in ("exposed_seconds", "elapsed_seconds", "step")}
        self._before = now
        steps = max(1.0, took["step"])
        mine = [took["exposed_seconds"] / steps, (took["elapsed_seconds"] - took["exposed_seconds"]) / steps]
        self._come_together("stragglers()")
        with alarming(self._runner):
            everyone = values_of_all(self._runner, mine)
        least = min(exposed for exposed, _ in everyone)
        return Stragglers(tuple(compute for _, compute in everyone), tuple(exposed - least for exposed, _ in everyone))

    def _come_together(self, call: str) -> None:
        """Wait until all ranks have made this call."""
        raise NotImplementedError
