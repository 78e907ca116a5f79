"""Supervisor: the process between the launcher and the ranks, pid 1 of their PID namespace where there is one.

It is started fresh (the launcher may have threads, and torch), reads one JSON line that says what to run, and then
signal numbers, from stdin; it writes one JSON list per event to stdout. It has one thread, so that it may fork.

Who ends whom: the kernel kills this process when the launcher's thread ends (die_with_parent), pid 1 when this
process ends, and every process of the PID namespace when its pid 1 ends. Nobody has to survive to clean up.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from gossamer.lab import network, syscalls
from gossamer.lab.breaking import Breaker
from gossamer.lab.environment import rank_environment
from gossamer.lab.faults import OF_HOSTS
from gossamer.lab.isolation import Unavailable, isolate, step
from gossamer.lab.processes import RankProcess, kill_descendants
from gossamer.lab.spec import LabSpec
from gossamer.lab.watch import Watch


def main() -> NoReturn:
    """Run the job that stdin describes, and exit."""
    job = json.loads(_first_line())
    syscalls.die_with_parent()
    if os.getppid() != job["launcher"]:  # it ended before we asked to be told
        os._exit(1)
    networked = job["shaping"] == "namespaces"
    try:
        isolate(network=networked)
    except Unavailable as error:
        if networked:
            report("unavailable", str(error))
            os._exit(0)
        syscalls.adopt_orphans()
        _supervise(job)
        kill_descendants()
        os._exit(0)
    _as_pid_1(lambda: _supervise(job))


def report(*event: Any) -> None:
    """Tell the launcher something; without a launcher there is nothing left to do."""
    data = json.dumps(event).encode() + b"\n"
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        kill_descendants()
        os._exit(1)


def _as_pid_1(work: Callable[[], None]) -> NoReturn:
    """Fork into the new PID namespace, do the work there, and wait for it."""
    alive, held = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(held)
        syscalls.die_with_parent()
        if select.select([alive], [], [], 0)[0]:  # closed: our parent ended before we asked to be told
            os._exit(1)
        work()
        os._exit(0)
    os.close(0)
    os.close(1)
    os.waitpid(pid, 0)
    os._exit(0)


def _supervise(job: dict[str, Any]) -> None:
    """Run the ranks to their end; the launcher is told what goes wrong with that."""
    try:
        _run(job)
    except Unavailable as error:
        report("failed", f"{error}; ulimit -a shows the limits of this shell")
    except Exception as error:
        sys.excepthook(*sys.exc_info())
        report("failed", f"{type(error).__name__}: {error}")


def _run(job: dict[str, Any]) -> None:
    spec = LabSpec.from_json(job["spec"])
    if os.getpid() == 1:
        _private_files(spec.hosts if job["shaping"] == "namespaces" else 0)
    namespaces: list[int | None] = [None] * spec.hosts
    delayed = False
    if job["shaping"] == "namespaces":
        try:
            made = network.host_namespaces(spec.hosts)
            network.connect(made, spec.rates)
        except Unavailable as error:
            report("unavailable", str(error))
            return
        delayed = _delay(spec, made)
        namespaces = list(made)
    elif job["shaping"] == "runner" and spec.latency_s:
        report("note", "latency is added by gossamer's own runner, to gossamer's own traffic only")
    elif any(fault.kind in OF_HOSTS for fault in spec.planned):
        report("failed", "faults of hosts' links need emulated hosts, which are not possible here")
        return
    report("started", job["shaping"])

    def start(rank: int) -> RankProcess:
        return _start(spec, rank, job, namespaces, delayed)

    ranks = [start(rank) for rank in range(spec.world)]
    Watch(spec, ranks, report, Breaker(spec, namespaces, ranks, report), start).run()


def _start(spec: LabSpec, rank: int, job: dict[str, Any], namespaces: list[int | None], delayed: bool) -> RankProcess:
    env = rank_environment(
        spec, rank, base=job["env"], shaping=job["shaping"], port=job["port"], run_id=job["run_id"], delayed=delayed
    )
    host = rank // spec.procs_per_host
    with step(f"starting rank {rank} of {spec.world}"):
        return RankProcess(rank, host, job["command"], env, namespaces[host])


def _delay(spec: LabSpec, namespaces: list[int]) -> bool:
    """Add latency in the kernel; whether that worked."""
    if not spec.latency_s:
        return False
    try:
        network.delay(namespaces, spec.rates, spec.latency_s)
    except Unavailable as error:
        report("note", f"{error}: latency is added by gossamer's own runner, to gossamer's own traffic only")
        return False
    return True


def _private_files(hosts: int) -> None:
    """Make /proc agree with os.getpid, and name the hosts, which nobody else could; both are only a courtesy."""
    try:
        syscalls.keep_mounts_private()
    except OSError:
        return  # nothing may be mounted which others would see
    with contextlib.suppress(OSError):
        syscalls.mount_proc()
    if hosts:
        with contextlib.suppress(OSError):
            # Also as IPv6 sockets see IPv4 peers: torch's store looks up every client, and warns of one without a name.
            names = [f"{way}{network.address(host)} host{host}" for host in range(hosts) for way in ("", "::ffff:")]
            syscalls.cover_file("/etc/hosts", "\n".join([Path("/etc/hosts").read_text(), *names, ""]))


def _first_line() -> bytes:
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(0, 1)  # not a byte more: what follows are signals
        if not data:
            os._exit(1)
        line += data
    return line


if __name__ == "__main__":
    main()
