"""Runs: what ranks see, what is handed on, and what a failure looks like."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gossamer.lab import LabError, LabSpec, run_lab
from gossamer.lab.launcher import _BOOT

from .conftest import SOURCES, Run

Lab = Callable[..., Run]
HERE = LabSpec(hosts=2, shaping="none")


def test_each_rank_sees_its_environment(lab: Lab, namespaces: None) -> None:
    source = """
        import json, os, socket, sys
        print(json.dumps(dict(os.environ) | {"argv": sys.argv[1:], "peer": socket.gethostbyname("host1")}))
        assert os.getpid() == int(os.readlink("/proc/self"))
        assert sys.stdin.read() == ""
    """
    run = lab(LabSpec(hosts=2, procs_per_host=2, rate="200mbit,1gbit"), source, "--epochs", "1", env={"MINE": "yes"})
    seen = [json.loads(run.stdout(rank)[0]) for rank in range(4)]
    assert run.result.exit_code == 0
    assert run.result.shaping == "namespaces"
    assert [env["RANK"] for env in seen] == ["0", "1", "2", "3"]
    assert [env["GOSSAMER_LAB_RATE"] for env in seen] == ["200mbit", "200mbit", "1gbit", "1gbit"]
    assert {(env["MINE"], env["peer"], *env["argv"]) for env in seen} == {("yes", "10.77.0.2", "--epochs", "1")}


def test_processes_of_a_host_share_its_network(lab: Lab, namespaces: None) -> None:
    run = lab(LabSpec(hosts=2, procs_per_host=2), 'import os; print(os.readlink("/proc/self/ns/net"))')
    spaces = [run.stdout(rank)[0] for rank in range(4)]
    assert spaces[0] == spaces[1] != spaces[2] == spaces[3]


def test_modules_run_too(lab: Lab) -> None:
    run = lab(HERE, ["-m", "json.tool", "--help"])
    assert run.result.exit_code == 0
    assert "usage" in run.stdout(1)[0]


def test_lines_stay_whole(lab: Lab) -> None:
    source = """
        import os, sys
        for number in range(200):
            for part in (f"{os.environ['RANK']} ", "x" * 100, f" {number}\\n"):
                print(part, end="", flush=True)
        print("last", end="", file=sys.stderr)
    """
    run = lab(HERE, source)
    for rank in range(2):
        assert run.stdout(rank) == [f"{rank} {'x' * 100} {number}" for number in range(200)]
        assert run.stderr(rank) == ["last"]


def test_the_first_failure_decides(lab: Lab, tmp_path: object) -> None:
    """Rank 1 fails first but takes long to be torn down; rank 0 sees that and ends before it, with another code."""
    source = f"""
        import atexit, os, pathlib, sys, time
        flag, number = (pathlib.Path({str(tmp_path)!r}) / name for name in ("flag", "number"))
        def wait_for(file):
            while not file.exists():
                time.sleep(0.01)
        def teardown():
            flag.touch()
            other = pathlib.Path("/proc") / number.read_text()
            while other.exists():
                time.sleep(0.01)
        if os.environ["RANK"] == "1":
            wait_for(number)
            atexit.register(teardown)
            raise ValueError("the cause")
        if os.environ["RANK"] == "0":
            number.with_suffix(".new").write_text(str(os.getpid()))
            number.with_suffix(".new").rename(number)
        wait_for(flag)
        sys.exit("connection closed by peer") if os.environ["RANK"] == "0" else time.sleep(60)
    """
    run = lab(LabSpec(hosts=3, shaping="none"), source)
    assert (run.result.exit_code, run.result.failed_rank, run.result.failed_host) == (1, 1, 1)
    assert run.result.traceback.startswith("Traceback (most recent call last):")
    assert run.result.traceback.endswith("ValueError: the cause")
    assert run.stderr(0) == ["connection closed by peer"]


def test_a_timeout_longer_than_a_selector_can_wait(lab: Lab) -> None:
    run = lab(LabSpec(hosts=1, shaping="none", timeout=1e10), "import time; time.sleep(0.1); print('done')")
    assert (run.result.exit_code, run.stdout(0)) == (0, ["done"])


def test_a_rank_killed_by_a_signal(lab: Lab) -> None:
    source = """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
    """
    run = lab(HERE, source)
    assert (run.result.exit_code, run.result.failed_rank) == (128 + 9, 1)


def test_ranks_that_will_not_end_are_killed(lab: Lab) -> None:
    source = """
        import os, signal, sys, time
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(7) if os.environ["RANK"] == "1" else time.sleep(60)
    """
    assert lab(HERE, source).result.exit_code == 7


def test_timeout(lab: Lab) -> None:
    run = lab(LabSpec(hosts=2, shaping="none", timeout=0.5), "import time; time.sleep(60)")
    assert (run.result.exit_code, run.result.timed_out, run.result.failed_rank) == (124, True, None)


def test_printed_with_prefix_and_attributed(
    capfd: pytest.CaptureFixture[str], script: Callable[[str], str], namespaces: None
) -> None:
    source = """
        import os, sys, time
        print("out")
        print("err", file=sys.stderr)
        time.sleep(0.3)
        if os.environ["RANK"] == "1":
            sys.exit("no luck")
    """
    assert run_lab(LabSpec(hosts=2), [script(source)]).exit_code == 1
    out, err = capfd.readouterr()
    assert sorted(out.splitlines()) == ["[rank 0] out", "[rank 1] out"]
    assert {"[rank 0] err", "[rank 1] err", "[rank 1] no luck"} <= set(err.splitlines())
    assert err.splitlines()[-2:] == ["[rank 1] no luck", "[lab] rank 1 on host 1 failed with exit code 1"]


def test_an_error_in_on_line_ends_the_run(script: Callable[[str], str]) -> None:
    def broken(rank: int, stream: str, line: str) -> None:
        raise LookupError(line)

    with pytest.raises(LookupError, match="hello"):
        run_lab(HERE, [script('print("hello"); import time; time.sleep(60)')], on_line=broken)


def test_runs_from_a_thread(lab: Lab) -> None:
    runs: list[Run] = []
    thread = threading.Thread(target=lambda: runs.append(lab(HERE, "print(1)")))
    thread.start()
    thread.join()
    assert runs[0].result.exit_code == 0


def test_bad_commands() -> None:
    with pytest.raises(ValueError, match="no script to run"):
        run_lab(HERE, [])
    with pytest.raises(ValueError, match="unknown option '--rat'"):
        run_lab(HERE, ["--rat", "2"])
    with pytest.raises(ValueError, match=r"there is no script 'nowhere\.py'"):
        run_lab(HERE, ["nowhere.py"])


@pytest.mark.parametrize(
    ("command", "env", "complaint"),
    [
        ("train.py", {}, r"must be a list of words, such as .*; got 'train\.py'"),
        (["-m", "json.tool", 1], {}, "word 2 of the command must be a text; got 1: write '1'"),
        (["-m", "json.tool"], {"N": 1}, "env must map texts to texts; got 'N': 1: write 'N': '1'"),
    ],
)
def test_words_that_are_no_texts_are_refused(command: Any, env: Any, complaint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is started."""
    monkeypatch.setattr(subprocess, "Popen", None)
    with pytest.raises(ValueError, match=complaint):
        run_lab(HERE, command, env=env)


def test_words_may_be_paths(script: Callable[[str], str]) -> None:
    lines: list[str] = []
    path = Path(script("import sys; print(*sys.argv[1:])"))
    run = run_lab(LabSpec(hosts=1, shaping="none"), [path, Path("data")], on_line=lambda *line: lines.append(line[2]))
    assert (run.exit_code, lines) == (0, ["data"])


@pytest.mark.parametrize(
    ("value", "complaint"),
    [("x" * 140_000, r"starting rank 0 of 2 failed with E2BIG \(.*\); ulimit -a"), ("\0", "ValueError: embedded null byte")],
)
def test_a_rank_that_cannot_be_started_is_an_error_that_says_why(lab: Lab, value: str, complaint: str) -> None:
    with pytest.raises(LabError, match=f"the lab's supervisor failed: {complaint}"):
        lab(HERE, "pass", env={"LONG": value})


@pytest.mark.parametrize("asked", [{"rate": "1gbit"}, {"latency": "2ms"}, {}])
def test_without_shaping_the_output_says_that_nothing_is_kept(lab: Lab, asked: dict[str, str]) -> None:
    run = lab(LabSpec(hosts=1, shaping="none", **asked), ["-c", "pass"])  # type: ignore[arg-type]
    assert [note.startswith("without shaping neither") for note in run.result.notes] == [True] * len(asked)


def test_gloo_all_reduce_over_four_hosts(lab: Lab, namespaces: None) -> None:
    source = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo")
        x = torch.full((1000,), float(dist.get_rank() + 1))
        dist.all_reduce(x)
        dist.destroy_process_group()
        print(x.unique().tolist())
    """
    run = lab(LabSpec(hosts=4, rate="200mbit", timeout=240), source)
    assert [run.stdout(rank) for rank in range(4)] == [["[10.0]"]] * 4


def test_the_supervisor_starts_without_torch() -> None:
    code = _BOOT.replace("main()", "assert not {'torch', 'typer', 'pyroute2'} & set(sys.modules)")
    subprocess.run([sys.executable, "-P", "-c", code, f"{SOURCES}/gossamer"], check=True)


SLICE = """
import ctypes, os, struct
libc = ctypes.CDLL(None, use_errno=True)
number = {"x86_64": 315, "aarch64": 275}[os.uname().machine]
before = ctypes.create_string_buffer(48)
assert libc.syscall(ctypes.c_long(number), 0, before, 48, 0) == 0
print(struct.unpack_from("Q", before, 24)[0])
"""


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (6, 12), reason="Linux from 6.12 has slices")
@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="system calls have other numbers")
def test_hosts_share_the_processors_in_fine_slices(lab: Callable[..., Run]) -> None:
    run = lab(LabSpec(hosts=2), SLICE)
    assert [run.stdout(rank) for rank in range(2)] == [["100000"]] * 2


def test_a_slowed_host_that_fails_first_is_named(lab: Lab) -> None:
    """The process that stops and continues it ends with it, before the others are told to end."""
    source = """
        import os, sys, time
        if os.environ["RANK"] == "1":
            raise ValueError("the slowed one")
        time.sleep(60)
    """
    run = lab(LabSpec(hosts=2, shaping="none", slow={1: 2}, timeout=40), source)
    assert (run.result.exit_code, run.result.failed_rank) == (1, 1)
    assert "ValueError: the slowed one" in run.result.traceback


def test_what_leaves_a_slowed_hosts_group_while_it_is_stopped_goes_on(lab: Lab) -> None:
    """A daemon whose order to stop came just before: the order to go on is for the group, and it is no longer in there."""
    source = """
        import os, signal
        if os.fork() == 0:
            os.setsid()
            os.kill(os.getpid(), signal.SIGSTOP)
            print("going on", flush=True)
            os._exit(0)
        os.wait()
    """
    run = lab(LabSpec(hosts=1, shaping="none", slow={0: 2}, timeout=20), source)
    assert run.result.exit_code == 0
    assert run.stdout(0) == ["going on"]
