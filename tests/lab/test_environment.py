"""Rank environment: torchrun's variables and the lab's own."""

from gossamer.lab import LabSpec
from gossamer.lab.environment import rank_environment

SPEC = LabSpec(hosts=3, procs_per_host=2, rate="200mbit,none,1gbit", latency="2ms", slow={1: 2.5})


def environment(rank: int, shaping: str = "namespaces", delayed: bool = False, **base: str) -> dict[str, str]:
    return rank_environment(SPEC, rank, base=base, shaping=shaping, port=1234, run_id="x", delayed=delayed)


def test_ranks_are_numbered_as_torchrun_does() -> None:
    env = environment(3)
    wanted = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "1"}
    wanted |= {"GROUP_WORLD_SIZE": "3", "NODE_RANK": "1", "ROLE_RANK": "3", "ROLE_WORLD_SIZE": "6"}
    wanted |= {"MASTER_ADDR": "10.77.0.1", "MASTER_PORT": "1234", "TORCHELASTIC_RUN_ID": "x"}
    wanted |= {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0", "GOSSAMER_LAB": "1", "GOSSAMER_LAB_HOST": "1"}
    wanted |= {"GOSSAMER_LAB_RATE": "unshaped", "GOSSAMER_LAB_SLOWDOWN": "2.5", "PYTHONUNBUFFERED": "1"}
    assert wanted.items() <= env.items()


def test_the_users_threads_are_kept() -> None:
    assert environment(0)["OMP_NUM_THREADS"] == "1"
    assert environment(0, OMP_NUM_THREADS="3")["OMP_NUM_THREADS"] == "3"


def test_runner_is_told_what_the_kernel_does_not_do() -> None:
    assert float(environment(0, "runner")["GOSSAMER_LAB_RATE_BPS"]) == 200e6
    assert environment(0, "runner")["MASTER_ADDR"] == "127.0.0.1"
    assert "GOSSAMER_LAB_RATE_BPS" not in environment(2, "runner")  # unshaped
    assert "GOSSAMER_LAB_RATE_BPS" not in environment(0, "namespaces", GOSSAMER_LAB_RATE_BPS="1")
    assert float(environment(0)["GOSSAMER_LAB_LATENCY_S"]) == 0.002
    assert "GOSSAMER_LAB_LATENCY_S" not in environment(0, delayed=True)


def test_no_shaping_says_so() -> None:
    env = environment(0, "none")
    assert env["GOSSAMER_LAB_RATE"] == "unshaped"
    assert "GOSSAMER_LAB_RATE_BPS" not in env
    assert "GOSSAMER_LAB_LATENCY_S" not in env
