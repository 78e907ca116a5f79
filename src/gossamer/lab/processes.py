"""Rank process: one process of the user's script, with the pipes that it writes to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from gossamer.lab import syscalls
from gossamer.lab.lines import ErrorTail

# One period of a slowed host's stop and go: short against a training step, long against a scheduler's slice.
_PERIOD_S = 0.03

_LOOK_EVERY_S = 1.0
"""How often the processes of slowed hosts are looked through."""

# The hosts share processors. A real host's wake up immediately when a message comes; with the kernel's own slices of about
# 3 ms they wait for the computation of others, once per hand-over between threads.
_SLICE_US = 100


class RankProcess:
    """One running rank; `exit_code` is None until it has ended."""

    def __init__(self, rank: int, host: int, command: Sequence[str], env: Mapping[str, str], namespace: int | None):
        def enter() -> None:
            syscalls.die_with_parent()
            with contextlib.suppress(OSError):  # older kernels: coarser slices
                syscalls.share_processors_finely(_SLICE_US)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell that starts us in the background ignores it
            if namespace is not None:
                syscalls.setns(namespace, syscalls.CLONE_NEWNET)

        self.rank = rank
        self.host = host
        self.exit_code: int | None = None
        self.failed_at: float | None = None
        self.broken = False
        """Whether a fault has ended it, or stopped it for ever: its end is no failure of the run."""
        self.restarts = False
        """Whether it is to be started again when it has ended."""
        self.tail = ErrorTail()
        # The supervisor has a single thread, so that running Python between fork and exec is safe here. Groups of
        # processes, not sessions: Linux schedules sessions against each other (autogroup), and a host that computes
        # would let its own network threads wait for up to 20 ms.
        self._process = subprocess.Popen(
            command, env=env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            bufsize=0, process_group=0, preexec_fn=enter,
        )  # fmt: skip
        self.pid = self._process.pid

    def streams(self) -> Iterable[tuple[str, int]]:
        """The name and the file descriptor of what can be read from it."""
        for name in ("stdout", "stderr"):
            pipe = getattr(self._process, name)
            os.set_blocking(pipe.fileno(), False)
            yield name, pipe.fileno()

    def ended(self, status: int, now: float) -> None:
        """Record a wait status.

        A rank whose traceback began just before has failed then: by the time that it has been torn down, other
        ranks may have ended of its closed connections.
        """
        code = os.waitstatus_to_exitcode(status)
        self._process.returncode = code
        self.exit_code = code if code >= 0 else 128 - code
        if self.exit_code:
            began = self.tail.traceback_at
            self.failed_at = began if began is not None and now - began < 30 else now

    def send(self, number: int) -> None:
        """Send a signal to the rank and the processes of its group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, number)


def pace(groups: Sequence[int], factor: float) -> int:
    """Fork a process that lets process groups run for 1/factor of the time; its pid."""
    pid = os.fork()
    if pid == 0:
        syscalls.die_with_parent()
        _stop_and_go(list(groups), factor)
    return pid


def kill_descendants() -> None:
    """Kill every process below this one, however it was made; this process must adopt orphans."""
    while pids := _children():
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _stop_and_go(groups: list[int], factor: float) -> NoReturn:
    """Stop for (factor − 1) times as long as was run, late timers made up for in the next round."""
    stop_seconds, looked = 0.0, time.monotonic()
    while groups:
        if time.monotonic() > looked + _LOOK_EVERY_S:
            looked = time.monotonic()
            _wake_strays(groups)
        ran = _signal_for(groups, signal.SIGCONT, _PERIOD_S / factor)
        stop_seconds += ran * (factor - 1)
        stop_seconds -= _signal_for(groups, signal.SIGSTOP, stop_seconds)
    os._exit(0)


def _wake_strays(groups: Sequence[int]) -> None:
    """Continue what left its group (a daemon does) while the order to stop was on its way to it: nobody else would."""
    for pid in _descendants(os.getppid()):
        with contextlib.suppress(OSError, ValueError):
            state, _, group = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[:3]
            if state == "T" and int(group) not in groups:
                os.kill(pid, signal.SIGCONT)


def _signal_for(groups: list[int], number: int, seconds: float) -> float:
    """Send a signal to all groups, wait, and say how long that really took; groups that are gone are dropped."""
    began = time.monotonic()
    for group in list(groups):
        try:
            os.killpg(group, number)
        except ProcessLookupError:
            groups.remove(group)
    time.sleep(max(0.0, seconds))
    return time.monotonic() - began


def _children(of: int | str = "self") -> list[int]:
    try:
        return [int(pid) for path in Path(f"/proc/{of}/task").glob("*/children") for pid in path.read_text().split()]
    except OSError:  # it has just ended
        return []


def _descendants(of: int) -> list[int]:
    found = _children(of)
    for pid in found:
        found += _children(pid)
    return found
