"""Rights: without root, and where namespaces are refused."""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from .conftest import WITHOUT_TORCH

LAB = """
import json, sys
from gossamer.lab import LabError, LabSpec, run_lab
lines = []
try:
    spec = LabSpec(hosts=2, rate="100mbit", shaping=sys.argv[2])
    result = run_lab(spec, [sys.argv[1]], on_line=lambda *line: lines.append(line))
    print(json.dumps([result.exit_code, result.shaping, " ".join(result.notes), sorted(lines)]))
except LabError as error:
    print(json.dumps(["refused", str(error)]))
"""

# What a container without rights does: unshare fails with EPERM, for this process and all that it starts.
DENY = f"""
import ctypes, struct
number = {{"x86_64": 272, "aarch64": 97}}[{platform.machine()!r}]
code = b"".join(struct.pack("HBBI", *step) for step in [
    (0x20, 0, 0, 0),                 # load the system call's number
    (0x15, 0, 1, number),            # is it unshare?
    (0x06, 0, 0, 0x00050000 | 1),    # fail with EPERM
    (0x06, 0, 0, 0x7FFF0000),        # allow
])
program = ctypes.create_string_buffer(code, len(code))
prog = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, prog, 0, 0) == 0, ctypes.get_errno()
"""

# An interpreter below a home directory that only its owner may enter is put where everybody may.
OPEN = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
home = "/" + sys.base_prefix.split("/")[1]
if not os.stat(home).st_mode & 0o005 == 0o005:
    assert libc.unshare(0x20000) == 0 and libc.mount(None, b"/", None, 0x44000, None) == 0
    held = os.open(sys.base_prefix, os.O_PATH)
    assert libc.mount(b"tmpfs", home.encode(), b"tmpfs", 0, b"mode=755") == 0
    os.makedirs(sys.base_prefix)
    assert libc.mount(f"/proc/self/fd/{held}".encode(), sys.base_prefix.encode(), None, 0x1000, None) == 0
    os.close(held)
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
assert libc.prctl(4, 1, 0, 0, 0) == 0  # what execve would do: /proc/self is ours again
"""

# What AppArmor does on some machines: a user namespace may be made, and then not be given this user's mapping.
UNMAPPED = """
import os
from pathlib import Path
from gossamer.lab.isolation import Unavailable, isolate
write = Path.write_text
def refuse(path, text):
    if path.name == "uid_map":
        raise PermissionError(1, "Operation not permitted")
    return write(path, text)
Path.write_text = refuse
try:
    isolate(network=True)
except Unavailable as error:
    print(error)
print(os.readlink("/proc/self/ns/pid_for_children") == os.readlink("/proc/self/ns/pid"))
"""

SHOW = 'import os; print(os.environ["MASTER_ADDR"], os.environ.get("GOSSAMER_LAB_RATE_BPS"))'


def python(tmp_path: Path, preamble: str, shaping: str, source: str = SHOW) -> list[object]:
    """Run the lab in a fresh interpreter, after a preamble; what it prints."""
    tmp_path.chmod(0o755)
    script = tmp_path / "show.py"
    script.write_text(source)
    command = [sys.executable, "-c", preamble + WITHOUT_TORCH + LAB, str(script), shaping]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout))


needs_filter = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="system call numbers unknown")


@needs_filter
def test_falls_back_and_says_what_is_missing(tmp_path: Path) -> None:
    code, shaping, notes, lines = python(tmp_path, DENY, "auto")
    assert (code, shaping) == (0, "runner")
    assert "unshare(CLONE_NEWNET) failed with EPERM (Operation not permitted)" in str(notes)
    assert "To allow them" in str(notes)
    assert "only gossamer's traffic is shaped" in str(notes)
    assert lines == [[rank, "stdout", "127.0.0.1 100000000.0"] for rank in range(2)]


@needs_filter
def test_daemons_end_in_the_fallback_too(tmp_path: Path) -> None:
    daemon = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(60)"])
    os._exit(0)
os.wait()
time.sleep(0.3)
print(*open(f"/proc/{os.getppid()}/task/{os.getppid()}/children").read().split())
"""
    outcome = python(tmp_path, DENY, "runner", daemon)
    pids = {int(pid) for _, _, line in outcome[3] for pid in line.split()}  # type: ignore[attr-defined]
    assert outcome[0] == 0
    assert len(pids) >= 4  # two ranks, two daemons
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@needs_filter
def test_refuses_where_namespaces_were_asked_for(tmp_path: Path) -> None:
    refused, message = python(tmp_path, DENY, "namespaces")
    assert refused == "refused"
    assert "unshare(CLONE_NEWNET) failed with EPERM" in str(message)


def test_without_root(nobody_reads: Callable[[], Path]) -> None:
    outcome = python(nobody_reads(), OPEN, "auto")
    assert outcome[:2] == [0, "namespaces"], outcome
    assert outcome[3] == [[rank, "stdout", "10.77.0.1 None"] for rank in range(2)]


def test_a_user_that_cannot_be_mapped_is_left_where_it_was(nobody_reads: Callable[[], Path]) -> None:
    command = [sys.executable, "-c", OPEN + WITHOUT_TORCH + UNMAPPED]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    reason = "mapping this user to root in a user namespace failed with EPERM (Operation not permitted)"
    assert done.stdout.splitlines() == [reason, "True"], done.stderr


@pytest.fixture
def nobody_reads() -> Iterator[Callable[[], Path]]:
    """A folder that the user nobody can enter; skips where there can be no such user, or no user namespace."""
    if os.geteuid() != 0:
        pytest.skip("only root can become the user nobody; every other test here then runs without root")
    probe = "import os, ctypes; os.setuid(65534); raise SystemExit(ctypes.CDLL(None).unshare(0x10000000))"
    if subprocess.run([sys.executable, "-c", probe], check=False).returncode:
        pytest.skip("this kernel gives user namespaces to nobody but root")

    with tempfile.TemporaryDirectory() as made:  # pytest's own folders are their owner's

        def folder() -> Path:
            Path(made).chmod(0o755)
            return Path(made)

        yield folder
