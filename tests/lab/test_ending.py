"""Endings: however a run is ended, nothing of it is left."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Launcher

Launch = Callable[[str, str], Launcher]

WAITING = """
    import os, sys, time
    try:
        print("up", "net=" + os.readlink("/proc/self/ns/net"), flush=True)
        time.sleep(60)
    except KeyboardInterrupt:
        print("interrupted", flush=True)
        sys.exit(1)
"""

IGNORING = """
    import os, signal, time
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    print("up", "net=" + os.readlink("/proc/self/ns/net"), flush=True)
    time.sleep(60)
"""

DAEMON = """
    import os, subprocess, sys, time
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]])
        os._exit(0)
    os.wait()
    print("up", "net=" + os.readlink("/proc/self/ns/net"), flush=True)
    time.sleep(float(os.environ.get("STAY", "60")))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("options", ["--shaping auto --rate 100mbit", "--shaping none"])
def test_signals_end_a_run(launch: Launch, options: str, number: int, code: int) -> None:
    launcher = launch(f"--hosts 2 {options}", WAITING)
    launcher.wait_for("up", 2)
    launcher.process.send_signal(number)
    out, err = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == code
    assert out.count("interrupted") == (2 if number == signal.SIGINT else 0)
    assert "gossamer/lab" not in err
    assert launcher.leaves_nothing()


def test_ctrl_c_ends_ranks_that_ignore_it(launch: Launch) -> None:
    launcher = launch("--hosts 2 --shaping none", IGNORING)
    launcher.wait_for("up", 2)
    launcher.process.send_signal(signal.SIGINT)
    launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 130
    assert launcher.leaves_nothing()


@pytest.mark.parametrize("options", ["--rate 100mbit", "--shaping none", "--slow 1=3 --shaping none"])
def test_kill_9_of_the_launcher_leaves_nothing(launch: Launch, namespaces: None, options: str) -> None:
    interfaces = sorted(os.listdir("/sys/class/net"))
    launcher = launch(f"--hosts 2 {options}", DAEMON)
    launcher.wait_for("up", 2)
    assert launcher.has(5)  # the launcher, two ranks, two daemons
    launcher.process.kill()
    launcher.process.wait()
    assert launcher.leaves_nothing()
    assert sorted(os.listdir("/sys/class/net")) == interfaces


def test_kill_9_of_a_rank_fails_the_run(launch: Launch, namespaces: None) -> None:
    launcher = launch("--hosts 2 --rate 100mbit", WAITING)
    launcher.wait_for("up", 2)
    os.kill(_rank_process(launcher.token), signal.SIGKILL)
    _, err = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode == 137
    assert "failed with exit code 137 (SIGKILL)" in err
    assert launcher.leaves_nothing()


def test_daemons_end_with_the_run(launch: Launch, namespaces: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAY", "0")
    launcher = launch("--hosts 2", DAEMON)
    launcher.process.wait(timeout=60)
    assert launcher.process.returncode == 0
    assert launcher.leaves_nothing()


def test_a_reader_that_goes_away_ends_the_run(launch: Launch) -> None:
    launcher = launch("--hosts 2 --shaping none", "while True: print('line')")
    launcher.wait_for("line")
    assert launcher.process.stdout is not None
    launcher.process.stdout.close()
    launcher.process.stdout = None
    _, err = launcher.process.communicate(timeout=60)
    assert launcher.process.returncode != 0
    assert "Traceback" not in err
    assert launcher.leaves_nothing()


def _rank_process(token: str) -> int:
    """A process of the token whose parent is not of the token: the supervisor started it."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if token.encode() in command and b"--" not in command:
            return int(path.parent.name)
    raise AssertionError("no rank is running")
