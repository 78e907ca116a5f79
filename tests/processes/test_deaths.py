"""A process that ends in mid-training is an error on every other one within ten seconds, and no process is left."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from gossamer.lab.launcher import reserve_port
from processes.harness import Launch, Process, launch

SECONDS = 30.0
"""Two or three when the machine is not busy."""


def slowly(*arguments: Any) -> Any:
    """A case that only `make test-slow` runs."""
    return pytest.param(*arguments, marks=pytest.mark.slow)


def die(algorithm: str, world: int, victim: int, way: str) -> list[Process]:
    arguments = {"algorithm": algorithm, "victim": str(victim), "way": way}
    return launch("scenarios_deaths", ["dies"], world, timeout=60, arguments=arguments)


def survivors(processes: Sequence[Process], name: str, victim: int, texts: Sequence[str], kinds: Sequence[str]) -> None:
    """Every rank but the victim was told, soon and by name, and ended with its own traceback, soon after."""
    moment = processes[victim].moment
    assert moment > 0, processes[victim].errors
    for process in processes:
        if process.rank == victim:
            continue
        assert name in process.reports, f"rank {process.rank}, code {process.code}:\n{process.errors[-3000:]}"
        told = process.reports[name].value
        print(f"rank {process.rank}, {told['end'] - moment:.1f} s, ended {process.ended - moment:.1f} s: {told}")
        assert told["kind"] in kinds, told
        assert all(text in told["text"] for text in texts), (told["text"], texts)
        assert told["end"] - moment < SECONDS
        assert process.code == 1, process.errors[-3000:]
        assert process.ended - told["end"] < SECONDS
        assert process.errors.count("Traceback") >= 1
        if victim != 0:
            assert "[W" not in process.errors, "the transport's own stack traces"


QUICK = [("AllReduce", 4, 2, "kill"), ("Gossip", 3, 0, "kill"), ("AllReduce", 3, 0, "raise"), ("Ring", 3, 1, "raise")]
SLOW = [case for case in product(("AllReduce", "Ring", "Gossip"), (3, 4), (0, 1, 2), ("kill", "raise")) if case not in QUICK]


def check_death(algorithm: str, world: int, victim: int, way: str) -> None:
    processes = die(algorithm, world, victim, way)
    texts = [f"rank {victim}"]
    if way == "raise":
        texts = [f"rank {victim} ended with ArithmeticError: the user's own mistake"]
        assert processes[victim].code == 1
    elif victim == 0:
        texts = ["rank 0"]  # or rather its host: the key-value store ended with it
    survivors(processes, "dies", victim, texts, ["CommunicationError"])


@pytest.mark.parametrize("case", QUICK, ids=lambda case: "-".join(map(str, case)))
def test_death_in_mid_step(case: tuple[str, int, int, str]) -> None:
    check_death(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW, ids=lambda case: "-".join(map(str, case)))
def test_every_death_in_mid_step(case: tuple[str, int, int, str]) -> None:
    check_death(*case)


@pytest.mark.parametrize(("algorithm", "victim"), [slowly("AllReduce", 2), ("Gossip", 0)])
def test_data_that_end_early(algorithm: str, victim: int) -> None:
    arguments = {"algorithm": algorithm, "victim": str(victim)}
    processes = launch("scenarios_deaths", ["ends_early"], 3, timeout=60, arguments=arguments)
    assert processes[victim].code == 0, processes[victim].errors
    survivors(processes, "ends_early", victim, [f"rank {victim} ended", "join()"], ["PeerLeftError"])


@pytest.mark.parametrize(("victim", "before"), [(0, "nothing"), slowly(1, "nothing"), (1, "a replica")])
def test_a_mistake_before_replicate(victim: int, before: str) -> None:
    arguments = {"victim": str(victim), "before": before}
    processes = launch("scenarios_deaths", ["never_comes"], 3, timeout=60, arguments=arguments)
    assert "TypeError" in processes[victim].errors
    assert "wirre" in processes[victim].errors
    survivors(
        processes, "never_comes", victim, [f"rank {victim}", "TypeError", "wirre"], ["PeerLeftError", "CommunicationError"]
    )


@pytest.mark.parametrize(("algorithm", "tidy"), [("AllReduce", "no"), slowly("Gossip", "yes")])
def test_processes_end_after_a_timeout(algorithm: str, tidy: str) -> None:
    arguments = {"algorithm": algorithm, "tidy": tidy, "busy": "5"}
    processes = launch("scenarios_deaths", ["gives_up"], 3, timeout=60, arguments=arguments)
    survivors(processes, "gives_up", 2, ["rank 2", "2 s"], ["CommunicationTimeout", "CommunicationError"])
    assert processes[2].code == 1
    assert "gave up" in processes[2].reports["gives_up"].value["text"]


def test_a_rank_that_is_killed_before_replicate() -> None:
    """It is told from a rank that is merely late, which is told too, when it comes."""
    arguments = {"algorithm": "AllReduce", "victim": "1", "late": "2"}
    processes = launch("scenarios_deaths", ["is_killed_before_replicate"], 4, timeout=120, arguments=arguments)
    name = "is_killed_before_replicate"
    waited = [process for process in processes if process.rank != 2]
    survivors(waited, name, 1, ["rank 1 will not come"], ["PeerLeftError", "CommunicationError"])
    told = processes[2].reports[name].value
    assert told["kind"] in ("PeerLeftError", "CommunicationError"), "perhaps only that the store has ended with rank 0"


@pytest.mark.slow
def test_torchrun_starts_again_what_has_failed_and_nothing_is_left_of_the_last_attempt(tmp_path: Path) -> None:
    """Rank 1 ends with an error before replicate(), says so on the board, and succeeds in the next attempt."""
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
            import os, torch, torch.distributed as dist, gossamer
            dist.init_process_group("gloo")
            attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], dist.get_rank()
            if attempt == "0" and rank == 1:
                raise ValueError("on purpose")
            model = torch.nn.Linear(3, 3)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            replica = gossamer.replicate(model, optimizer, gossamer.AllReduce(), timeout=60)
            model(torch.ones(2, 3)).sum().backward()
            optimizer.step()
            replica.close()
            print("trained in attempt", attempt, flush=True)
        """)
    )
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--max-restarts=1",
        "--nproc-per-node=2",
        "--master-addr=127.0.0.1",
    ]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    with reserve_port("127.0.0.1") as held:
        command += [f"--master-port={held.getsockname()[1]}", "--rdzv-backend=static", str(script)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.count("trained in attempt 1") == 2, ended.stdout


def standing(pause: str, timeout: str, steps: str) -> Launch:
    """Three ranks in mid-training; rank 2 begins a pause."""
    arguments = {"algorithm": "AllReduce", "pause": pause, "timeout": timeout, "steps": steps}
    running = Launch("scenarios_deaths", ["waits_for_rank_2"], 3, timeout=120, arguments=arguments)
    for rank in range(3):
        running.wait_until_said(rank, "training")
    return running


def test_a_rank_that_is_preempted_says_so() -> None:
    running = standing("60", "60", "400")
    running.send(2, signal.SIGTERM)
    processes = running.wait()
    assert processes[2].code == -signal.SIGTERM
    survivors(processes, "waits_for_rank_2", 2, ["rank 2 ended with SIGTERM"], ["CommunicationError"])


def test_a_rank_that_is_stopped_for_longer_than_the_timeout_is_told_that_it_was_late() -> None:
    running = standing("0", "4", "100000")
    running.send(2, signal.SIGSTOP)
    time.sleep(9)
    running.send(2, signal.SIGCONT)
    processes = running.wait()
    survivors(processes, "waits_for_rank_2", 2, ["rank 2"], ["CommunicationTimeout", "CommunicationError"])
    told = processes[2].reports["waits_for_rank_2"].value["text"]
    assert "late: rank 2" in told or "rank 2 was late" in told


def test_a_rank_that_is_stopped_for_less_goes_on() -> None:
    running = standing("0", "60", "600")
    running.send(2, signal.SIGSTOP)
    time.sleep(4)
    running.send(2, signal.SIGCONT)
    for process in running.wait():
        assert process.code == 0, process.errors[-3000:]
        assert "done" in process.output


def test_an_alarm_that_a_third_party_forges_is_ignored() -> None:
    """It reaches the store's port, reads what is there, and writes in every rank's name what a rank would write."""
    running = standing("5", "60", "40")
    store = dist.TCPStore("127.0.0.1", running.port, is_master=False)  # type: ignore[attr-defined]
    keys = [key for key in store.list_keys() if key.rpartition("/")[0].endswith("/alarm")]
    assert len(keys) == 3
    for key in keys:
        written = store.get(key).decode()
        store.set(key, written.partition("|")[0] + "|1 rank 1: the job is over")
        store.set(key.rpartition("/alarm/")[0] + "/news", "1")
    processes = running.wait()
    for process in processes:
        assert process.code == 0, process.errors[-3000:]
        assert "done" in process.output
    assert any("no rank of this run wrote it" in process.errors for process in processes)


@pytest.mark.parametrize("where", ["exchange", slowly("replicate")])
def test_interrupt(where: str) -> None:
    running = Launch(
        "scenarios_deaths", ["is_interrupted"], 3, timeout=60, arguments={"algorithm": "AllReduce", "where": where}
    )
    for rank in (0, 1):
        running.wait_until_said(rank, "waiting")
    running.wait_until_said(2, "busy")
    time.sleep(0.5)
    moment = time.time()
    for rank in (0, 1):
        running.send(rank, signal.SIGINT)
    time.sleep(3.0)
    running.send(2, signal.SIGKILL)
    for process in running.wait()[:2]:
        assert process.code == -signal.SIGINT, process.errors[-3000:]
        assert "KeyboardInterrupt" in process.errors
        print(f"rank {process.rank} ended after {process.ended - moment:.1f} s")
        assert process.ended - moment < 20.0


@pytest.mark.parametrize(
    ("algorithm", "order"), [("Gossip", "last"), slowly("Gossip", "first"), slowly("AllReduce", "destroyed")]
)
def test_an_ordinary_script_ends_well_and_quietly(algorithm: str, order: str) -> None:
    processes = launch("scenarios_deaths", ["ends_well"], 3, timeout=60, arguments={"algorithm": algorithm, "order": order})
    for process in processes:
        assert process.code == 0, process.errors[-3000:]
        assert process.output == ""
        assert process.errors == ""


def test_the_threads_of_a_process_group_end_when_it_is_destroyed() -> None:
    """Else one that drops a tensor while the interpreter is torn down aborts a process that was done."""
    for process in launch("scenarios_deaths", ["leaves_nothing"], 2, timeout=60, arguments={"algorithm": "Gossip"}):
        threads = process.reports["leaves_nothing"].value
        assert not [name for name in threads if "gloo" in name], threads


def test_only_rank_0_speaks() -> None:
    processes = launch("scenarios_deaths", ["speaks"], 3, timeout=60, arguments={"algorithm": "AllReduce"})
    assert "replicating Sequential over 3 ranks with AllReduce" in processes[0].output
    assert all("gossamer" not in process.output + process.errors for process in processes[1:])
