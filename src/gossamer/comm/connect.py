"""Connection: finds the runner that fits the place in which the script runs."""

import os
from datetime import timedelta
from typing import Any

from gossamer.comm import loopback
from gossamer.comm.loopback import solo_runner
from gossamer.comm.runner import Runner
from gossamer.comm.torch import process_exit
from gossamer.comm.torch.waiting import seconds_of
from gossamer.errors import ConfigurationError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
"""Where launchers write how many processes they started: torchrun, Open MPI, MPICH and Intel MPI, MVAPICH, srun."""

process_exit.listen()
process_exit.let_groups_end()


def connect(group: Any = None, mesh: Any = None, timeout: float | timedelta | None = None, by_machine: bool = False) -> Runner:
    """The runner for this rank: loopback inside :func:`gossamer.loopback`, else torch's, else a world of one.

    ``mesh``: a ``DeviceMesh`` whose ranks are the replicas; it stands for its process group. ``by_machine``: it may have
    two dimensions, machines and the workers of each.
    """
    machine, ranks = None, None
    if mesh is not None:
        if group is not None:
            raise ConfigurationError("give group= or mesh=, not both")
        from gossamer.comm.torch.mesh import place_in

        group, machine, ranks = place_in(mesh, by_machine)
    inside = loopback.current_runner()
    from gossamer.comm.torch import groups
    from gossamer.comm.torch import runner as torch_runner

    if inside is None and groups.initialised():
        runner = torch_runner.TorchRunner(group, timeout, machine, ranks)
        if runner.world > 1:
            return runner
        alone = solo_runner()
        alone.part = runner.part
        return alone
    seconds_of(timeout, timedelta(0))
    if inside is not None:
        return inside
    for name in _SIZES:
        size = os.environ.get(name, "1")
        if size.isdecimal() and int(size) > 1:
            raise ConfigurationError(
                f"this process was launched as one of {size} ({name}), but there is no process group: call "
                "torch.distributed.init_process_group() before gossamer.replicate(). "
                f"If each of them is to train alone, unset {name}"
            )
    return solo_runner()


def default_group() -> Any:
    """The process group that :func:`connect` takes where none is given; None in loopback, and where there is none."""
    from gossamer.comm.torch import groups

    if loopback.current_runner() is not None or not groups.initialised():
        return None
    return groups.world_group()
