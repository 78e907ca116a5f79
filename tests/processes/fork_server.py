"""A fork server: a process that has imported torch, and becomes a rank as often as it is asked to.

Importing is most of what a short launch costs. The child goes on as an ordinary main program, to the interpreter's own
end, so that exits, signals and threads are those of a script. There is a server for each rank number: the ranks of one launch
share no seed of Python's hashes and of generators, as they would not on machines of their own. Launches after each other do.
"""

import contextlib
import functools
import gc
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent.parent

ANSWER_SECONDS = 120.0  # importing torch for the first time, on a machine that does much else


class Forked:
    """A child of a server, as ``subprocess.Popen`` would show it."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self.pid, self._server = pid, server
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, or None while it runs; minus the signal's number if one has ended it."""
        if self.returncode is None:
            self.returncode = self._server.ended().pop(self.pid, None)
        return self.returncode

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # ended since
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it by force."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The client's side of one server, which ends with this process. ``environment``: beside that of this process."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._environment = {**environment}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "processes.fork_server"],
            env=os.environ | self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # what a buffer holds, select() does not see
            start_new_session=True,
        )
        self._ready = False
        self._ended: dict[int, int] = {}

    def wait_until_ready(self) -> None:
        """Wait until it has imported what it imports."""
        if not self._ready:
            self._read()
            self._ready = True

    def fork(self, arguments: Sequence[str], environment: Mapping[str, str], out: Path, err: Path) -> Forked:
        """Begin a rank: ``processes.worker`` with these arguments, and with this besides in its environment."""
        self.wait_until_ready()
        for file in (out, err):
            file.touch()  # they are there when this returns, whenever the child opens them
        whole = os.environ | self._environment | {**environment}
        request = {"arguments": [*arguments], "environment": whole, "folder": os.getcwd(), "out": str(out), "err": str(err)}
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request).encode() + b"\n")
        while "pid" not in (answer := self._read()):
            self._ended |= {answer["ended"]: answer["code"]}
        return Forked(self, answer["pid"])

    def ended(self) -> dict[int, int]:
        """Exit statuses of processes that have ended and were not asked after yet."""
        while self._answers(within=0.0):
            answer = self._read()
            self._ended |= {answer["ended"]: answer["code"]}
        return self._ended

    def _answers(self, within: float) -> bool:
        return bool(select.select([self._process.stdout], [], [], within)[0])

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not self._answers(within=ANSWER_SECONDS):
            raise TimeoutError(f"the fork server {self._process.pid} did not answer within {ANSWER_SECONDS:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the fork server has ended with status {self._process.wait()}; stderr says why")
        return json.loads(line)


@functools.cache
def fork_server(rank: int) -> ForkServer:
    """The server for this rank number, begun if there is none yet."""
    path = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH", "")]))
    return ForkServer({"PYTHONPATH": path, "OMP_NUM_THREADS": "1"})


def fork_servers(world: int) -> list[ForkServer]:
    """The servers of this many ranks, ready: new ones import at the same time."""
    servers = [fork_server(rank) for rank in range(world)]
    for server in servers:
        server.wait_until_ready()
    return servers


def serve() -> None:
    """Fork for each line of stdin and say who has ended; returns in a child, and leaves with the end of stdin."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests, answers = os.fdopen(os.dup(0), "rb", buffering=0), os.fdopen(os.dup(1), "w")

    def answer(**what: int) -> None:
        print(json.dumps(what), file=answers, flush=True)

    answer(ready=1)
    while True:
        readable, _, _ = select.select([requests, woken], [], [])
        if woken in readable:
            os.read(woken, 4096)
            with contextlib.suppress(ChildProcessError):
                while (found := os.waitpid(-1, os.WNOHANG))[0]:
                    answer(ended=found[0], code=os.waitstatus_to_exitcode(found[1]))
        if requests in readable:
            line = requests.readline()
            if not line:
                sys.exit()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for open_end in (requests, answers):
                    open_end.close()
                os.close(woken)
                os.close(wake)
                become(json.loads(line))
                return
            answer(pid=pid)


def become(request: dict[str, Any]) -> None:
    """Make this process the one that was asked for."""
    os.setsid()
    sources = [os.open(os.devnull, os.O_RDONLY)]
    sources += [os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name in ("out", "err")]
    for number, source in enumerate(sources):
        os.dup2(source, number)
        os.close(source)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.argv = ["processes.worker", *request["arguments"]]


if __name__ == "__main__":
    # Not gossamer, which notices the end of the process that imports it and not that of a fork of it.
    import numba  # noqa: F401
    import torch._dynamo  # an optimizer imports it on its first use, for two seconds
    import torch.distributed.tensor  # noqa: F401

    gc.freeze()  # a fork neither searches nor copies what is here
    serve()
    from processes import worker

    worker.main()
