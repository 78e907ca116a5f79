"""Launchers: the process group of a script that ``mpirun``, ``mpiexec`` or ``srun`` started, without ``torchrun``.

::

    from gossamer.integrations.launchers import init_process_group

    init_process_group("gloo")  # mpirun -n 8 python train.py
    replica = gossamer.replicate(model, optimizer, gossamer.Gossip())
"""

import os
import re
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from gossamer.errors import ConfigurationError

__all__ = ["Place", "init_process_group", "place"]


@dataclass(frozen=True)
class Place:
    """The place of this process among the processes that were started together.

    ``host``, ``port``: where rank 0 listens; None where the launcher does not say and they may be on several machines.
    """

    rank: int
    world: int
    local_rank: int
    local_world: int | None
    host: str | None
    port: int | None


_NAMES = {
    "Open MPI": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    "MVAPICH": ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
    "SLURM": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "MPICH": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""Where launchers write rank, world, rank on the machine, and ranks on the machine. (Under SLURM with MPI both are there.)"""


def place(environment: Mapping[str, str] = os.environ) -> Place | None:
    """What the launcher tells this process: torchrun's variables where they are there, else those of Open MPI, MVAPICH, SLURM,
    MPICH or Intel MPI; None where nothing was launched.

    Raises:
        ConfigurationError: variables that are no numbers, or do not fit each other.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = next((each for each in (names, *_NAMES.values()) if each[0] in environment and each[1] in environment), None)
    if found is None:
        return None
    rank, world = (_number(environment, name) for name in found[:2])
    if not 0 <= rank < world:
        raise ConfigurationError(f"{found[0]}={rank} and {found[1]}={world} do not fit each other")
    local = _number(environment, found[2]) if found[2] in environment else 0
    here = environment.get(found[3], "")
    together = int(here) if here.isdecimal() else None  # srun writes "2(x3),1": the ranks on each machine
    alone = together == world
    return Place(rank, world, local, together, _host(environment, alone), _port(environment, alone))


def init_process_group(backend: str | None = None, **options: Any) -> Place:
    """``torch.distributed.init_process_group`` with what the launcher tells, and torchrun's variables set for other libraries.

    Does nothing where there is a process group, or where nothing was launched (the script then trains alone).

    Args:
        backend: as torch takes it: ``"gloo"``, ``"nccl"``, or by device.
        options: further arguments of torch's function (``timeout=``, ``device_id=`` …).

    Raises:
        ConfigurationError: on several machines, if nobody says where rank 0 listens.
    """
    found = place()
    if dist.is_initialized() or found is None:
        return found or Place(0, 1, 0, 1, None, None)
    if found.host is None or found.port is None:
        raise ConfigurationError(
            f"rank {found.rank} of {found.world}: the launcher does not say where rank 0 listens: set MASTER_ADDR to the "
            "address of its machine and MASTER_PORT to a free port there, the same on all ranks (mpirun -x MASTER_ADDR=…)"
        )
    _tell(os.environ, found)
    dist.init_process_group(backend, **options)
    return found


def _tell(environment: MutableMapping[str, str], found: Place) -> None:
    """Write torchrun's variables."""
    told = {"RANK": found.rank, "WORLD_SIZE": found.world, "LOCAL_RANK": found.local_rank}
    told |= {"MASTER_ADDR": found.host, "MASTER_PORT": found.port}  # type: ignore[dict-item]
    if found.local_world is not None:
        told["LOCAL_WORLD_SIZE"] = found.local_world
    environment.update({name: str(value) for name, value in told.items()})


def _host(environment: Mapping[str, str], alone: bool) -> str | None:
    """The address of rank 0's machine. ``alone``: all ranks are on this one."""
    if "MASTER_ADDR" in environment:
        return environment["MASTER_ADDR"]
    if alone:
        return "127.0.0.1"
    return _first_host(environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST", "")))


def _first_host(nodes: str) -> str | None:
    """The first of ``"login,gpu[003-007,9]-ib"``: names with ranges in brackets, separated by commas."""
    found = re.match(r"([^,\[]+)(?:\[([^\]]+)\]([^,]*))?", nodes)
    if found is None:
        return None
    name, several, rest = found.groups()
    return str(name) if several is None else f"{name}{re.split('[-,]', several)[0]}{rest}"


def _port(environment: Mapping[str, str], alone: bool) -> int | None:
    """The port of rank 0: the same for all processes of a job, another for the next job."""
    if "MASTER_PORT" in environment:
        return _number(environment, "MASTER_PORT")
    if "SLURM_JOB_ID" in environment:
        steps = _number(environment, "SLURM_JOB_ID") * 16 + int(environment.get("SLURM_STEP_ID", "0"))
        return 20_000 + steps % 40_000
    # Open MPI's name of a job begins with the process id of mpirun; without one, jobs of one machine share torch's port.
    job = re.sub(r"\D", "", environment.get("PMIX_NAMESPACE", environment.get("OMPI_MCA_ess_base_jobid", "")))
    return 20_000 + int(job) % 40_000 if job else 29_500 if alone else None


def _number(environment: Mapping[str, str], name: str) -> int:
    try:
        return int(environment[name])
    except ValueError:
        raise ConfigurationError(f"{name}={environment[name]!r} is no whole number") from None
