"""Cluster: the benchmark as ranks that torchrun has started, on the hosts and the network that there are."""

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from gossamer.bench.cases import Case, Turns, rows_of, without_figures
from gossamer.bench.catalogue import find_workload
from gossamer.bench.paired import missing, run
from gossamer.bench.ranks import of_all
from gossamer.bench.rows import Record
from gossamer.errors import ConfigurationError


def is_here() -> bool:
    """Whether this process is a rank that torchrun, or whatever sets the same variables, has started."""
    return {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()


@contextmanager
def joined(workloads: Sequence[str]) -> Iterator[None]:
    """Inside, all ranks are a process group: of NCCL if the first workload's model is on a GPU, otherwise of Gloo."""
    device = next(find_workload(workloads[0]).build_model().parameters()).device
    if device.type == "cuda":
        torch.cuda.set_device(device)
    elif torch.cuda.is_available() and os.environ["RANK"] == "0":
        sys.stderr.write(
            f"{workloads[0]}: build_model() leaves the model on the processor, so that is what is measured, over Gloo. For "
            "GPUs, have build_model() and random_batch() put theirs on f\"cuda:{os.environ['LOCAL_RANK']}\"\n"
        )
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


def agree(told: Mapping[str, Any]) -> None:
    """Raise ConfigurationError on every rank unless all are told the same, who would otherwise wait for each other. Collective.

    Torchrun is typed on every host, and each may have another copy of a file.
    """
    first, *others = of_all(dict(told))
    for rank, own in enumerate(others, 1):
        for name in told:
            if own[name] != first[name]:
                raise ConfigurationError(f"{name}: rank {rank} has {own[name]!r}, rank 0 has {first[name]!r}")


def cases_here(workloads: Sequence[str]) -> list[Case]:
    """Every workload on this network, as it is. Raises ConfigurationError before anything is measured if one cannot be."""
    for workload in workloads:
        find_workload(workload)
    local, backend = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), dist.get_backend()
    network = "as is" if backend == "gloo" else f"as is over {backend}"
    interface = os.environ.get(f"{backend.upper()}_SOCKET_IFNAME")
    network += f" on {interface}" if interface else ""
    network += "" if local == 1 else f", {local} workers per host"
    return [Case(workload, network, dist.get_world_size() // local) for workload in workloads]


def absent_here(case: Case, methods: Sequence[str]) -> list[Record]:
    """Rows of those of ``methods`` that cannot run on some rank. Collective."""
    return without_figures(case, "missing", missing(methods))


def measure_here(
    case: Case, methods: Sequence[str], turns: Turns, on_record: Callable[[Record], None] | None = None
) -> list[Record]:
    """As :func:`gossamer.bench.cases.measure`, by these ranks; all get the rows of the first. Collective."""

    def told(index: int, rounds: int) -> None:
        if on_record is not None:
            on_record({"round": index, "of": rounds})

    found = run(find_workload(case.workload), methods, turns.rounds, turns.steps, turns.warmup, told)
    return of_all(rows_of(case, found))[0]
