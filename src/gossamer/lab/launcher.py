"""Launcher: runs a script on the emulated hosts and hands on what the ranks write."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from gossamer.errors import ConfigurationError, GossamerError
from gossamer.lab.isolation import advice
from gossamer.lab.printing import RankPrinter
from gossamer.lab.result import LabResult
from gossamer.lab.spec import LabSpec

OnLine = Callable[[int, str, str], None]

# In a network namespace of its own every port is free.
_PORT = 29500

_PATIENCE_S = 10.0

# The supervisor needs neither torch nor what else gossamer imports: it gets the package's path without its __init__.
_BOOT = """
import sys, types
package = types.ModuleType("gossamer")
package.__path__ = [sys.argv[1]]
sys.modules["gossamer"] = package
from gossamer.lab._supervisor import main
main()
"""


_ONLY_OURS = (
    "all ranks run on 127.0.0.1, and the rate is kept by gossamer's own runner: only gossamer's traffic is shaped, "
    "that of DistributedDataParallel or anything else is not"
)

_NOT_KEPT = "without shaping neither the rate nor the latency is kept: all ranks run on 127.0.0.1, as fast as this machine is"


class LabError(GossamerError, RuntimeError):
    """The lab cannot run here as asked; the message says what is missing and what to do."""


def run_lab(
    spec: LabSpec,
    command: Sequence[str | os.PathLike[str]],
    *,
    env: Mapping[str, str] | None = None,
    on_line: OnLine | None = None,
) -> LabResult:
    """Run `command` (a script and its arguments, or `-m`, a module and its arguments) as every rank of the lab.

    `env` is added to this process's environment. `on_line(rank, stream, line)` is called with every line, `stream`
    being "stdout" or "stderr"; without it lines are printed, each with its rank. Waits for the run's end, and leaves
    nothing behind. Called from the main thread, Ctrl-C ends the run and raises KeyboardInterrupt, and SIGTERM, where
    nothing else handles it, SystemExit. Raises LabError where the lab cannot run, ConfigurationError for a bad command
    or environment.
    """
    if sys.platform != "linux":
        raise LabError("the lab needs Linux: it is made of its namespaces and signals")
    job = {"spec": spec.to_json(), "command": _python(_words(command)), "env": _environment(env or {})}
    printer = RankPrinter(spec)
    sink = on_line or printer.line
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        if on_line is None:
            printer.note(text)

    def attempt(shaping: str) -> dict[str, Any]:
        if shaping == "runner" and any(rate.bps for rate in spec.rates):
            note(_ONLY_OURS)
        if shaping == "none" and (spec.latency_s or any(rate.bps for rate in spec.rates)):
            note(_NOT_KEPT)
        return _Session(job, shaping).run(sink, note)

    shaping = "namespaces" if spec.shaping == "auto" else spec.shaping
    outcome = attempt(shaping)
    if "unavailable" in outcome:
        missing = f"emulated hosts are not possible here: {outcome['unavailable']}. To allow them, {advice()}."
        if spec.shaping == "namespaces":
            raise LabError(missing)
        note(missing)
        shaping = "runner"
        outcome = attempt(shaping)
    result = LabResult(**outcome, shaping=shaping, notes=tuple(notes))
    if on_line is None:
        printer.result(result)
    return result


class _Session:
    """One supervisor, from its start to its end."""

    def __init__(self, job: dict[str, Any], shaping: str) -> None:
        self._signal: int | None = None
        self._held = reserve_port("127.0.0.1")
        port = _PORT if shaping == "namespaces" else self._held.getsockname()[1]
        job = job | {"shaping": shaping, "port": port, "run_id": uuid.uuid4().hex[:12], "launcher": os.getpid()}
        self._job = json.dumps(job).encode() + b"\n"  # before there is a process that somebody would have to end
        package = Path(__file__).resolve().parent.parent
        # A session of its own: the terminal's Ctrl-C comes to us alone, and we pass it on.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _BOOT, str(package)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True,
        )  # fmt: skip

    def run(self, on_line: OnLine, note: Callable[[str], None]) -> dict[str, Any]:
        """Hand on events until the supervisor ends; the outcome it reported."""
        outcome: dict[str, Any] = {}
        try:
            with self._signals():
                self._send(self._job)
                for event in self._events():
                    outcome |= _handle(event, on_line, note)
                self._process.wait()
        finally:
            self._close()
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal is not None:
            raise SystemExit(128 + self._signal)
        if "failed" in outcome:
            raise LabError(f"the lab's supervisor failed: {outcome['failed']}")
        if not outcome:
            raise LabError(f"the lab's supervisor ended without an outcome (status {self._process.returncode})")
        return outcome

    def _events(self) -> Iterator[list[Any]]:
        assert self._process.stdout is not None
        fd, rest = self._process.stdout.fileno(), b""
        while data := os.read(fd, 1 << 16):
            *lines, rest = (rest + data).split(b"\n")
            yield from (json.loads(line) for line in lines)

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            while data:
                data = data[os.write(self._process.stdin.fileno(), data) :]

    def _close(self) -> None:
        """Leave nothing running, whatever has gone wrong here: without its pipes the supervisor ends by itself."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._held.close()

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass the first Ctrl-C or SIGTERM on to the ranks; a second one kills them."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handlers = {signal.SIGINT: signal.getsignal(signal.SIGINT), signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
        if handlers[signal.SIGTERM] is not signal.SIG_DFL:
            del handlers[signal.SIGTERM]
        for number in handlers:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._signal is not None:
            self._process.kill()
            return
        self._signal = number
        self._send(bytes([number]))


def _handle(event: list[Any], on_line: OnLine, note: Callable[[str], None]) -> dict[str, Any]:
    match event:
        case ["line", rank, stream, line]:
            on_line(rank, stream, line)
        case ["note", text]:
            note(text)
        case ["unavailable", reason]:
            return {"unavailable": reason}
        case ["failed", reason]:
            return {"failed": reason}
        case ["end", outcome]:
            return dict(outcome)
    return {}


def _words(command: object) -> list[str]:
    """The words of a command; ConfigurationError for anything else than a list of texts and paths."""
    if isinstance(command, str | bytes) or not isinstance(command, Sequence):
        raise ConfigurationError(f"the command must be a list of words, such as ['train.py', '--epochs', '1']; got {command!r}")
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in command]
    for place, word in enumerate(words):
        if not isinstance(word, str):
            raise ConfigurationError(f"word {place} of the command must be a text; got {word!r}: write {str(word)!r}")
    return words


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """This process's environment, with ``env`` added to it; ConfigurationError for what is no text."""
    for name, value in env.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise ConfigurationError(
                f"env must map texts to texts; got {name!r}: {value!r}: write {str(name)!r}: {str(value)!r}"
            )
    return dict(os.environ) | dict(env)


def _python(words: Sequence[str]) -> list[str]:
    """The full command line; ConfigurationError where there is nothing to run."""
    if not words:
        raise ConfigurationError("no script to run: write it after --, for example: gossamer lab --hosts 4 -- train.py")
    if words[0].startswith("-") and words[0] not in ("-m", "-c"):
        raise ConfigurationError(f"unknown option {words[0]!r}: what follows -- is a script, or -m and a module")
    if not words[0].startswith("-") and not Path(words[0]).is_file():
        raise ConfigurationError(f"there is no script {words[0]!r} here (for a module, write -m {words[0]})")
    return [sys.executable, *words]


def reserve_port(address: str) -> socket.socket:
    """A socket that keeps a port at ``address`` from all others until it is closed.

    The kernel gives the port to nobody who asks for any port or connects. A server that names it, with SO_REUSEADDR as
    torch's store does, can listen there, because this socket does not.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind((address, 0))
    return held
