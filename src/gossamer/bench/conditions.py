"""Conditions: on what machine, with what versions and under which load figures are taken; kept beside them."""

import os
import platform
import socket
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.cuda import nccl

import gossamer
from gossamer.bench.peers import PEERS
from gossamer.bench.ranks import of_all


def load() -> float:
    """The load average of the last minute: how many threads of the whole machine had, or waited for, a processor."""
    return os.getloadavg()[0]


def busy_machine() -> list[str]:
    """A warning, to be given before anything is measured, if other work has kept the processors busy in the last minute."""
    before, processors = load(), os.cpu_count() or 1
    if before <= processors / 2:
        return []
    return [
        f"The machine was busy at the beginning (load {before:.1f} on {processors} cores): figures of a quiet one are better."
    ]


def busy_hosts() -> list[str]:
    """The same of every host of a cluster, by name. Collective."""
    found = of_all((socket.gethostname(), busy_machine()))
    return [f"{host}: {line}" for host, lines in dict(found).items() for line in lines]


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def processor() -> str:
    """The processor's model, as the kernel calls it."""
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def accelerator() -> dict[str, str]:
    """The GPU that this process has used, and the versions of CUDA and NCCL; nothing without one."""
    if not torch.cuda.is_initialized():
        return {}
    known = ".".join(map(str, nccl.version())) if dist.is_nccl_available() else "none"
    return {"accelerator": torch.cuda.get_device_name(), "cuda": str(torch.version.cuda), "nccl": known}


def conditions(methods: Iterable[str], load_before: float, seeds: Any) -> dict[str, Any]:
    """What a row of results tells of how it came about, to be asked for at the end.

    ``load_before``: :func:`load` when it began; the one after is mostly what the measurement itself made, and the one
    before holds what the same command measured in the minute before. ``packages``: the versions of what ``methods`` use
    beside PyTorch. ``seeds``: of models and batches, in the form that the measurement has them.
    """
    return here() | {"packages": packages(methods), "seeds": seeds, "load_before": load_before, "load_after": load()}


def here() -> dict[str, Any]:
    """The versions of everything, and the machine."""
    versions = {"gossamer": gossamer.__version__, "python": platform.python_version(), "torch": torch.__version__}
    return accelerator() | versions | {"processor": processor(), "cores": cores()}


def of_hosts() -> dict[str, Any]:
    """What is to be told of a cluster's hosts besides: their names, and each model of processor. Collective.

    Nothing in the lab, whose hosts are one machine.
    """
    everyone = of_all((socket.gethostname(), processor()))
    if "GOSSAMER_LAB" in os.environ:
        return {}
    names, processors = (sorted(set(each)) for each in zip(*everyone, strict=True))
    return {"host_names": names, "processor": " / ".join(processors)}


def packages(methods: Iterable[str]) -> dict[str, str]:
    """Versions of the installed distributions that ``methods`` are made of, PyTorch's own left out."""
    modules = {PEERS[method].module for method in methods if method in PEERS} - {"torch"}
    if not modules:
        return {}
    found = packages_distributions()  # reads what is said of every installed distribution
    return {name: version(name) for module in sorted(modules) for name in sorted(set(found.get(module, ())))}
