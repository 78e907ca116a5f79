"""Faults: read with errors that name the wrong word; caused when and where they were asked for, and nowhere else."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gossamer.lab import LabError, LabSpec

from .conftest import Run

Lab = Callable[..., Run]


@pytest.mark.parametrize(
    ("fault", "complaint"),
    [
        ("kil 2 @20s", r"'kil' is no fault: write 'kill RANK @TIME'"),
        ("", "is no fault"),
        ("kill @20s", "does not say which rank"),
        ("cut @20s", "does not say which host"),
        ("kill two @20s", "'two' is no rank: give its number"),
        ("power-off host2 @20s", "'host2' is no host"),
        ("kill 2", r"does not say when: add @TIME, for example 'kill 2' @20s"),
        ("kill 2 @20", "'20' is no time: write for example @20s"),
        ("kill 2 @line:", "'line:' is no time"),
        ("kill 2 5s @20s", "'5s' is one word too many"),
        ("stop 2 soon @20s", "'soon' is no duration"),
        ("throttle 2 @20s", "does not say to which rate"),
        ("throttle 2 fast @20s", "'fast' is no rate"),
        ("throttle 2 unshaped @20s", "'unshaped' does not throttle"),
        ("kill 4 @20s", "fault kill names rank 4: ranks are 0 to 3"),
        ("cut 2 @20s", "fault cut names host 2: hosts are 0 to 1"),
        ("stop 1 @20s", "fault stop of rank 1, whose host is slowed by stopping"),
    ],
)
def test_refuses(fault: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        LabSpec(hosts=2, procs_per_host=2, slow={0: 2.0}, faults=[fault])


@pytest.mark.parametrize("shaping", ["none", "runner"])
def test_a_fault_of_a_link_needs_a_link(shaping: Any) -> None:
    with pytest.raises(ValueError, match=rf"fault cut breaks a host's link, which shaping='{shaping}' does not have"):
        LabSpec(hosts=2, shaping=shaping, faults=["cut 1 @1s"])


def test_survives_json() -> None:
    spec = LabSpec(hosts=3, faults=["stop 1 5s @20s", "throttle 2 4mbit 3s @line:epoch 1"])
    again = LabSpec.from_json(spec.to_json())
    assert list(map(str, again.planned)) == ["stop rank 1 for 5 s", "throttle host 2 to 4mbit for 3 s"]
    assert (again.planned[0].at, again.planned[1].line) == (20.0, "epoch 1")


def test_a_kill_at_a_time_and_the_others_run_to_their_own_end(lab: Lab) -> None:
    source = """
        import os, sys, time
        time.sleep(60 if os.environ["RANK"] == "1" else 4)
        print("done")
        sys.exit(3 if os.environ["RANK"] == "2" else 0)
    """
    run = lab(LabSpec(hosts=3, shaping="none", faults=["kill 1 @0.5s"], timeout=120), source)
    assert [run.stdout(rank) for rank in range(3)] == [["done"], [], ["done"]]
    assert (run.result.exit_code, run.result.failed_rank) == (3, 2), "a rank that a fault ended is no failure"
    assert run.result.notes == ("fault: kill rank 1",)


STOPPED = """
    import os, time
    if os.environ["RANK"] == "1":
        longest, last = 0.0, time.monotonic()
        end = last + 60
        print("ready", flush=True)
        while longest < 0.8 and time.monotonic() < end:
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            time.sleep(0.01)
        print("stood still" if longest >= 0.8 else "never")
"""


def test_a_stop_ends_after_its_duration(lab: Lab) -> None:
    run = lab(LabSpec(hosts=2, shaping="none", faults=["stop 1 1s @line:ready"], timeout=120), STOPPED)
    assert run.stdout(1) == ["ready", "stood still"]
    assert run.result.notes == ("fault: stop rank 1 for 1 s", "end of fault: stop rank 1 for 1 s")


def test_a_rank_that_is_stopped_for_ever_ends_with_the_others(lab: Lab) -> None:
    run = lab(LabSpec(hosts=2, shaping="none", faults=["stop 1 @line:ready"], timeout=120), STOPPED)
    assert run.stdout(1) == ["ready"]
    assert (run.result.exit_code, run.result.timed_out) == (0, False)


def test_a_restarted_rank_runs_again(lab: Lab, tmp_path: object) -> None:
    source = f"""
        import os, pathlib, time
        mark = pathlib.Path({str(tmp_path)!r}) / "mark"
        if os.environ["RANK"] == "1" and not mark.exists():
            mark.touch()
            print("first", flush=True)
            time.sleep(60)
        print("end")
    """
    run = lab(LabSpec(hosts=2, shaping="none", faults=["restart 1 @line:first"], timeout=120), source)
    assert (run.stdout(0), run.stdout(1)) == (["end"], ["first", "end"])
    assert run.result.exit_code == 0


# Rank 0 and rank 1 are connected; rank 0 says what comes, and what TCP tells it of the other end.
TALK = """
    import os, socket, time
    rank = int(os.environ["RANK"])
    if rank == 1:
        while True:
            try:
                link = socket.create_connection(("10.77.0.1", 4000))
                break
            except OSError:
                time.sleep(0.02)
        print("connected", flush=True)
        end = time.monotonic() + {seconds}
        while time.monotonic() < end:
            link.sendall(bytes({size}))
            time.sleep(0.02)
    else:
        link = socket.create_server(("10.77.0.1", 4000)).accept()[0]
        link.settimeout(1.0)
        came, quiet, ended = 0, 0, "open"
        until = time.monotonic() + {limit}
        while time.monotonic() < until:
            try:
                data = link.recv(1 << 20)
            except TimeoutError:
                quiet += 1
                print("quiet", flush=True)
                continue
            except OSError as error:
                ended = type(error).__name__
                break
            if not data:
                ended = "closed"
                break
            came += len(data)
        print("quiet" if quiet >= 2 else "flowing", ended, came)
"""


def test_a_cut_drops_everything_silently_and_heals(lab: Lab, namespaces: None) -> None:
    source = TALK.format(seconds=9, size=10, limit=60)
    run = lab(LabSpec(hosts=2, faults=["cut 1 4s @line:connected"], timeout=120), source)
    quiet, ended, came = run.stdout(0)[-1].split()
    assert (quiet, ended) == ("quiet", "closed"), "nothing for a while, then the rest, and an ordinary end"
    assert int(came) % 10 == 0


def test_a_host_that_is_switched_off_says_nothing(lab: Lab, namespaces: None) -> None:
    """No end and no reset of its connections; those of a killed rank are closed by the kernel."""
    source = TALK.format(seconds=60, size=10, limit=5)
    run = lab(LabSpec(hosts=2, faults=["power-off 1 @line:connected"], timeout=120), source)
    assert run.stdout(0)[-1].split()[:2] == ["quiet", "open"]
    run = lab(LabSpec(hosts=2, faults=["kill 1 @line:connected"], timeout=120), source)
    assert run.stdout(0)[-1].split()[1] != "open"


def test_a_throttled_host_sends_at_the_new_rate(lab: Lab, namespaces: None) -> None:
    """Of 8 MB in 10 s at 80 kbit/s less than 2 MB arrive, bursts and queues included."""
    source = TALK.format(seconds=8, size=20_000, limit=10)

    def throttled(rate: str, fault: str) -> Run:
        return lab(LabSpec(hosts=2, rate=rate, faults=[fault], timeout=120), source)

    heals, stays = "throttle 1 80kbit 4s @line:connected", "throttle 1 80kbit @line:connected"
    with ThreadPoolExecutor() as side_by_side:  # they wait for their network
        *healed, run = side_by_side.map(throttled, ("100mbit", "unshaped", "100mbit"), (heals, heals, stays))
    assert int(run.stdout(0)[-1].split()[2]) < 2_000_000
    for run in healed:
        assert int(run.stdout(0)[-1].split()[2]) > 50_000
        assert run.result.notes == (
            "fault: throttle host 1 to 80kbit for 4 s",
            "end of fault: throttle host 1 to 80kbit for 4 s",
        )


def test_where_hosts_cannot_be_emulated_a_fault_of_a_link_is_refused(
    lab: Lab, script: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from gossamer.lab import launcher

    refused = launcher._Session.run

    def without(self: Any, on_line: Any, note: Any) -> dict[str, Any]:
        if b'"namespaces"' in self._job.split(b'"shaping"')[-1]:
            self._close()
            return {"unavailable": "on purpose"}
        return refused(self, on_line, note)

    monkeypatch.setattr(launcher._Session, "run", without)
    with pytest.raises(LabError, match="faults of hosts' links need emulated hosts"):
        lab(LabSpec(hosts=2, faults=["cut 1 @1s"]), "pass")
