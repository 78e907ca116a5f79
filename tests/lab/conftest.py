"""What the lab's tests share: scripts to run, launchers to end, and whether this machine allows namespaces."""

import os
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import gossamer.lab
from gossamer.lab import LabResult, LabSpec, run_lab

SOURCES = str(Path(gossamer.lab.__file__).parents[2])

# Begins a program that needs the lab alone: `import gossamer` brings torch, and seconds of start.
WITHOUT_TORCH = f"""
import sys, types
package = types.ModuleType("gossamer")
package.__path__ = [{SOURCES + "/gossamer"!r}]
sys.modules["gossamer"] = package
"""

_COMMAND = WITHOUT_TORCH + "from gossamer.lab.command import main; main()"


@dataclass
class Run:
    """A finished run and the lines that it wrote."""

    result: LabResult
    lines: list[tuple[int, str, str]]

    def stdout(self, rank: int) -> list[str]:
        return [line for who, stream, line in self.lines if (who, stream) == (rank, "stdout")]

    def stderr(self, rank: int) -> list[str]:
        return [line for who, stream, line in self.lines if (who, stream) == (rank, "stderr")]


@pytest.fixture
def script(tmp_path: Path) -> Callable[[str], str]:
    """Writes a script down and returns its path."""

    def write(source: str) -> str:
        path = tmp_path / f"script_{uuid.uuid4().hex[:8]}.py"
        path.write_text(textwrap.dedent(source))
        return str(path)

    return write


@pytest.fixture
def lab(script: Callable[[str], str]) -> Callable[..., Run]:
    """Runs a script's source, or a command, in a lab."""

    def run(spec: LabSpec, source: str | list[str], *arguments: str, env: dict[str, str] | None = None) -> Run:
        lines: list[tuple[int, str, str]] = []
        command = source if isinstance(source, list) else [script(source), *arguments]
        result = run_lab(spec, command, env=env, on_line=lambda *line: lines.append(line))
        return Run(result, lines)

    return run


@dataclass
class Launcher:
    """A `gossamer lab` in a process of its own, and the traces by which its processes are known."""

    process: subprocess.Popen[str]
    token: str
    seen: list[str] = field(default_factory=list)

    def wait_for(self, text: str, times: int = 1) -> None:
        """Read stdout until `text` has come `times` times."""
        assert self.process.stdout is not None
        while sum(text in line for line in self.seen) < times:
            line = self.process.stdout.readline()
            assert line, f"ended before it wrote {text!r}: {self.seen}"
            self.seen.append(line)

    def word(self, name: str) -> set[str]:
        """The values which ranks wrote as `name=value`."""
        return {word.split("=")[1] for line in self.seen for word in line.split() if word.startswith(f"{name}=")}

    def left(self) -> list[str]:
        """What is still there of the run: processes, and network namespaces that ranks were in."""
        spaces = self.word("net") - {_namespace(os.getpid())}
        return [what for pid in _pids() for what in (_command(pid), _namespace(pid)) if self.token in what or what in spaces]

    def has(self, count: int) -> bool:
        """Whether `count` of its processes and namespaces are there within 10 s: one that just starts has no name yet."""
        deadline = time.monotonic() + 10
        while len(left := self.left()) < count:
            if time.monotonic() > deadline:
                raise AssertionError(f"not {count}: {left}")
            time.sleep(0.05)
        return True

    def leaves_nothing(self) -> bool:
        """Whether all is gone within 10 s: the kernel takes a moment."""
        deadline = time.monotonic() + 10
        while left := self.left():
            if time.monotonic() > deadline:
                raise AssertionError(f"left behind: {left}")
            time.sleep(0.05)
        return True


@pytest.fixture
def launch(script: Callable[[str], str]) -> Iterator[Callable[..., Launcher]]:
    """Starts `gossamer lab` with a script."""
    started: list[Launcher] = []

    def start(options: str, source: str) -> Launcher:
        token = f"token-{uuid.uuid4().hex}"
        command = [sys.executable, "-c", _COMMAND, *options.split(), "--", script(source), token]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        started.append(Launcher(subprocess.Popen(command, **pipes), token))
        return started[-1]

    yield start
    for launcher in started:
        launcher.process.kill()
        launcher.process.communicate()


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _namespace(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        return ""
