"""Harness: real processes on this machine, each one rank of a Gloo group, with the environment that torchrun would give it.

A *scenario* is a function of a module in this folder that takes a :class:`processes.worker.Here`. One launch runs one
scenario or many in sequence, and every rank reports what each returned or raised.
"""

import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gossamer.lab.launcher import reserve_port
from processes.fork_server import Forked, ForkServer, fork_servers


@dataclass
class Report:
    """What one scenario did on one rank: ``error`` is the type and text of what it raised, ``seconds`` how long it took."""

    value: Any = None
    error: str = ""
    traceback: str = ""
    seconds: float = 0.0


@dataclass
class Process:
    """One rank of a launch, after its end: when it ended, and the moment that it marked, as of ``time.time()``."""

    rank: int
    code: int
    output: str
    errors: str
    seconds: float
    ended: float = 0.0
    moment: float = 0.0
    reports: dict[str, Report] = field(default_factory=dict)


class Launch:
    """Processes under way. ``wait()`` ends them all, by force after the timeout: a test never hangs."""

    def __init__(
        self,
        module: str,
        scenarios: Sequence[str],
        world: int,
        *,
        timeout: float = 60.0,
        arguments: Mapping[str, str] | None = None,
    ) -> None:
        servers = fork_servers(world)
        self.world, self._end, self._begin = world, time.monotonic() + timeout, time.time()
        self._folder = tempfile.TemporaryDirectory(prefix="gossamer-test-")
        self._held = reserve_port("127.0.0.1")
        self.port: int = self._held.getsockname()[1]
        command = [module, ",".join(scenarios), self._folder.name]
        self._processes = [self._spawn(servers[rank], rank, command, arguments or {}) for rank in range(world)]

    def _spawn(self, server: ForkServer, rank: int, command: Sequence[str], arguments: Mapping[str, str]) -> Forked:
        environment = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world),
            "LOCAL_RANK": str(rank),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
            # The server of a TCPStore looks up the name of every client; a slow name server stalls it for seconds.
            "RES_OPTIONS": "timeout:1 attempts:1",
        }
        environment |= {f"SCENARIO_{key.upper()}": value for key, value in arguments.items()}
        return server.fork(command, environment, self._file(rank, "out"), self._file(rank, "err"))

    def _file(self, rank: int, kind: str) -> Path:
        return Path(self._folder.name) / f"{rank}.{kind}"

    def send(self, rank: int, number: signal.Signals) -> None:
        """Send a signal to one rank."""
        self._processes[rank].send_signal(number)

    def said(self, rank: int, text: str) -> bool:
        """Whether a rank has printed ``text`` yet."""
        return text in self._file(rank, "out").read_text(errors="replace")

    def wait_until_said(self, rank: int, text: str) -> None:
        """Wait until a rank has printed ``text``."""
        while not self.said(rank, text) and time.monotonic() < self._end and self._processes[rank].poll() is None:
            time.sleep(0.02)
        if not self.said(rank, text):
            self.wait()
            raise AssertionError(f"rank {rank} never said {text!r}")

    def wait(self) -> list[Process]:
        """The ranks, ended. Ranks that had to be killed for time have the code -9 and say so in ``errors``."""
        ended: dict[int, float] = {}
        while len(ended) < self.world and time.monotonic() < self._end:
            for rank, process in enumerate(self._processes):
                if rank not in ended and process.poll() is not None:
                    ended[rank] = time.time()
            time.sleep(0.02)
        hung = [rank for rank in range(self.world) if rank not in ended]
        for rank in hung:
            self._processes[rank].kill()
            self._processes[rank].wait()
        result = [self._collect(rank, ended.get(rank, float("inf"))) for rank in range(self.world)]
        self._folder.cleanup()
        self._held.close()
        return result

    def _collect(self, rank: int, ended: float) -> Process:
        out = self._file(rank, "out").read_text(errors="replace")
        err = _without_lookups(self._file(rank, "err").read_text(errors="replace"))
        if ended == float("inf"):
            err += "\nHUNG: killed by the harness"
        mark = self._file(rank, "moment")
        moment = float(mark.read_text()) if mark.exists() else 0.0
        saved = self._file(rank, "pt")
        reports = torch.load(saved, weights_only=False) if saved.exists() else {}
        reports = {name: Report(**fields) for name, fields in reports.items()}
        code = self._processes[rank].returncode
        return Process(rank, code, out, err, ended - self._begin, ended, moment, reports)


def launch(module: str, scenarios: Sequence[str], world: int, **options: Any) -> list[Process]:
    """Run scenarios on ``world`` processes and wait for their end."""
    return Launch(module, scenarios, world, **options).wait()


def launch_side_by_side(module: str, parts: Sequence[Sequence[str]], world: int, **options: Any) -> list[Process]:
    """The same for scenarios that mostly sleep: each part has processes of its own, and a rank's are reported as one."""
    launches = [Launch(module, part, world, **options) for part in parts]
    return [_as_one(processes) for processes in zip(*(each.wait() for each in launches), strict=True)]


def _as_one(processes: Sequence[Process]) -> Process:
    one = processes[0]
    for other in processes[1:]:
        one.code, one.seconds = one.code or other.code, max(one.seconds, other.seconds)
        one.output, one.errors = one.output + other.output, one.errors + other.errors
        one.reports |= other.reports
    return one


def _without_lookups(text: str) -> str:
    """What a process said, without what torch's store says of a name server that does not answer."""
    return "".join(line for line in text.splitlines(keepends=True) if "hostname of the client socket cannot be" not in line)


def require(processes: Sequence[Process], scenario: str) -> list[Any]:
    """What a scenario returned on every rank; fails with every rank's own words if any rank did not return."""
    problems = []
    for process in processes:
        report = process.reports.get(scenario)
        if report is None:
            problems.append(f"rank {process.rank}: no report (code {process.code})\n{process.errors[-3000:]}")
        elif report.error:
            problems.append(f"rank {process.rank}: {report.traceback}")
    assert not problems, "\n".join(problems)
    return [process.reports[scenario].value for process in processes]
