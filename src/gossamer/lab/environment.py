"""Rank environment: the variables that torchrun would set, and the lab's own."""

from __future__ import annotations

from collections.abc import Mapping

from gossamer.lab import network
from gossamer.lab.spec import LabSpec

# What torchrun would keep if the user has set it.
_DEFAULTS = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

RATE = "GOSSAMER_LAB_RATE"
RATE_BPS = "GOSSAMER_LAB_RATE_BPS"
LATENCY_S = "GOSSAMER_LAB_LATENCY_S"
SLOWDOWN = "GOSSAMER_LAB_SLOWDOWN"


def rank_environment(
    spec: LabSpec, rank: int, *, base: Mapping[str, str], shaping: str, port: int, run_id: str, delayed: bool
) -> dict[str, str]:
    """The environment of one rank.

    `shaping` is what is really done (`namespaces`, `runner` or `none`), `delayed` whether the kernel already adds
    the latency: what it does not do is left to gossamer's runner, by GOSSAMER_LAB_RATE_BPS (bits per second and
    host) and GOSSAMER_LAB_LATENCY_S (seconds, one way); with `none` nothing is.
    """
    host, local = divmod(rank, spec.procs_per_host)
    rate = spec.rates[host]
    values = {
        "RANK": rank,
        "LOCAL_RANK": local,
        "WORLD_SIZE": spec.world,
        "LOCAL_WORLD_SIZE": spec.procs_per_host,
        "GROUP_RANK": host,
        "GROUP_WORLD_SIZE": spec.hosts,
        "NODE_RANK": host,
        "ROLE_RANK": rank,
        "ROLE_WORLD_SIZE": spec.world,
        "ROLE_NAME": "default",
        "MASTER_ADDR": network.address(0) if shaping == "namespaces" else "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": 0,
        "TORCHELASTIC_MAX_RESTARTS": 0,
        "TORCHELASTIC_USE_AGENT_STORE": False,
        "GOSSAMER_LAB": 1,
        "GOSSAMER_LAB_HOST": host,
        RATE: "unshaped" if shaping == "none" else rate.text,
        SLOWDOWN: f"{spec.slow.get(host, 1.0):g}",
        **_transport(host, shaping),
    }
    if shaping == "runner" and rate.bps is not None:
        values[RATE_BPS] = rate.bps
    if spec.latency_s and shaping != "none" and not delayed:
        values[LATENCY_S] = spec.latency_s
    inherited = {name: value for name, value in base.items() if name not in (RATE_BPS, LATENCY_S)}
    return _DEFAULTS | inherited | {name: str(value) for name, value in values.items()}


def _transport(host: int, shaping: str) -> dict[str, str]:
    """Keep Gloo and NCCL on the emulated network.

    NCCL would otherwise see that two hosts are one machine and pass by the network, through shared memory.
    """
    interface = network.INTERFACE if shaping == "namespaces" else "lo"
    names = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface, "TP_SOCKET_IFNAME": interface}
    return names | {"NCCL_HOSTID": f"gossamer-lab-{host}", "NCCL_IB_DISABLE": "1"}
