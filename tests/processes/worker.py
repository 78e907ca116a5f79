"""Worker: one rank of a launch. Runs the named scenarios of a module in sequence and saves a report of each."""

import contextlib
import importlib
import logging
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import gossamer
from gossamer.comm.torch import board as failure_board

GROUP_TIMEOUT = 60.0


@dataclass
class Here:
    """Where a scenario runs. Replicas that it makes with :meth:`replicate` are closed after it."""

    rank: int
    world: int
    folder: Path
    replicas: list[gossamer.Replica] = field(default_factory=list)

    def replicate(self, *arguments: Any, **options: Any) -> gossamer.Replica:
        """``gossamer.replicate`` with a short timeout: a bug is an error here, not a hang."""
        replica = gossamer.replicate(*arguments, **{"timeout": 30.0} | options)
        self.replicas.append(replica)
        return replica

    def close(self) -> None:
        """Close every replica of the scenario; one whose run has failed may say so again."""
        for replica in self.replicas:
            try:
                replica.close()
            except gossamer.GossamerError:
                continue
        self.replicas.clear()

    def gathered(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of every rank, in order."""
        rows = [torch.empty_like(tensor) for _ in range(self.world)]
        dist.all_gather(rows, tensor.detach().contiguous())
        return rows

    def save(self, reports: dict[str, Any]) -> None:
        """Hand reports to the test, even if this process is killed a moment later."""
        partial = self.folder / f"{self.rank}.partial"
        torch.save(reports, partial)
        partial.rename(self.folder / f"{self.rank}.pt")

    def mark(self) -> None:
        """Hand the present moment to the test."""
        (self.folder / f"{self.rank}.moment").write_text(str(time.time()))

    def argument(self, name: str) -> str:
        """An argument of the launch."""
        return os.environ[f"SCENARIO_{name.upper()}"]

    def say(self, text: str) -> None:
        """Print a line that the test waits for."""
        print(text, flush=True)


def main() -> None:
    """Run the scenarios named on the command line."""
    module, names, folder = sys.argv[1:4]
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    scenarios = importlib.import_module(f"processes.{module}")
    dist.init_process_group("gloo", timeout=timedelta(seconds=GROUP_TIMEOUT))
    if module not in ("scenarios_failures", "scenarios_counts"):  # elsewhere a machine that stands still is no fault
        failure_board.WARN_AFTER = 60.0
    # Scenarios give AdamW to what averages weights, on purpose; whatever else stands on stderr is a failure.
    logging.getLogger("gossamer").addFilter(lambda record: "GossipAdamW learns faster" not in record.getMessage())
    here, reports, listed = Here(rank, world, Path(folder)), {}, names.split(",")
    for name in listed:
        reports[name] = attempt(getattr(scenarios, name), here)
        here.save(reports)
        if name != listed[-1]:
            meet(rank, world, name)


def attempt(scenario: Callable[[Here], Any], here: Here) -> dict[str, Any]:
    """Run one scenario; what it returned or raised."""
    begin, report = time.monotonic(), {"value": None, "error": "", "traceback": ""}
    torch.manual_seed(0)
    try:
        report["value"] = scenario(here)
    except Exception as error:
        if getattr(scenario, "ends_the_process", False):
            raise
        report |= {"error": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()}
    report["seconds"] = time.monotonic() - begin
    if not getattr(scenario, "ends_the_process", False):
        here.close()
    return report


def ends_the_process(scenario: Callable[[Here], Any]) -> Callable[[Here], Any]:
    """Mark a scenario as a script of its own: what it raises is not caught, and its replicas are not closed."""
    scenario.ends_the_process = True  # type: ignore[attr-defined]
    return scenario


def threads() -> list[str]:
    """The names of this process's threads."""
    found = []
    for place in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found.append(place.read_text().strip())
    return found


def meet(rank: int, world: int, name: str) -> None:
    """Wait for the others through the store: it works whatever state the last scenario left the groups in."""
    store = dist.distributed_c10d._get_default_store()
    store.set(f"met/{name}/{rank}", "1")
    store.wait([f"met/{name}/{other}" for other in range(world)], timedelta(seconds=90))


if __name__ == "__main__":
    main()
