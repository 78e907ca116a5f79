"""Connection: finds the runner that fits the place in which the script runs."""

import os
from datetime import timedelta
from typing import Any

from gossamer.comm import loopback, torch_departure
from gossamer.comm.patience import seconds_of
from gossamer.comm.runner import Runner, solo_runner
from gossamer.errors import ConfigurationError

torch_departure.listen()


def connect(group: Any = None, mesh: Any = None, timeout: float | timedelta | None = None) -> Runner:
    """The runner for this rank: loopback inside :func:`gossamer.loopback`, else torch's, else a world of one.

    ``mesh``: a one-dimensional ``DeviceMesh`` whose ranks are the replicas; it stands for its process group.
    """
    group = _group_of(group, mesh)
    inside = loopback.current_runner()
    from gossamer.comm import torch_runner

    if inside is None and torch_runner.initialised():
        runner = torch_runner.TorchRunner(group, timeout)
        return runner if runner.world > 1 else solo_runner()
    seconds_of(timeout, timedelta(0))
    if inside is not None:
        return inside
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        raise ConfigurationError(
            f"this process was launched as one of {world} (WORLD_SIZE), but there is no process group: "
            "call torch.distributed.init_process_group() before gossamer.replicate()"
        )
    return solo_runner()


def _group_of(group: Any, mesh: Any) -> Any:
    if mesh is None:
        return group
    if group is not None:
        raise ConfigurationError("give group= or mesh=, not both")
    if not callable(getattr(mesh, "get_group", None)):
        raise ConfigurationError(f"mesh= takes a torch.distributed.device_mesh.DeviceMesh; got {mesh!r}")
    if mesh.ndim != 1:
        raise ConfigurationError(
            f"mesh= takes the one dimension over which the model is replicated, this one has {mesh.ndim}: "
            f'pass a slice, such as mesh["replicate"] (dimensions: {mesh.mesh_dim_names})'
        )
    return mesh.get_group()
