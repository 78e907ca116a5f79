"""Mesh: the process group that a ``DeviceMesh`` stands for, and the machine of this process in it."""

from typing import Any

import torch.distributed as dist

from gossamer.errors import ConfigurationError


def place_in(mesh: Any, by_machine: bool) -> tuple[Any, int | None]:
    """The process group of a mesh, and which machine this process is on, if the mesh says so.

    One dimension: the replicas, wherever they are. Two (``by_machine``): machines, by the workers of each.

    Raises:
        ConfigurationError: something else than a mesh, other dimensions, or a process that is not in it.
    """
    if not callable(getattr(mesh, "get_group", None)):
        raise ConfigurationError(f"mesh= takes a torch.distributed.device_mesh.DeviceMesh; got {mesh!r}")
    if mesh.ndim == 1:
        return mesh.get_group(), None
    if mesh.ndim == 2 and by_machine:
        return _whole(mesh), _row(mesh)
    wanted = "machines x workers of each" if by_machine else "the one dimension over which the model is replicated"
    raise ConfigurationError(
        f"mesh= takes {wanted}, this one has {mesh.ndim}: pass a slice, such as mesh["
        f'"replicate"] (dimensions: {mesh.mesh_dim_names}); two dimensions, machines x workers, are for Hierarchical() '
        "without ranks_per_node"
    )


def _row(mesh: Any) -> int:
    place = mesh.get_coordinate()
    if place is None:
        raise ConfigurationError(f"this process is not in {mesh}: do not call replicate() on it")
    return int(place[0])


def _whole(mesh: Any) -> Any:
    """A group of all processes of a mesh. Collective among them, unless they are all there are."""
    _row(mesh)
    ranks = sorted(mesh.mesh.flatten().tolist())
    if ranks == list(range(dist.get_world_size())):
        return dist.group.WORLD
    return dist.new_group(ranks, use_local_synchronization=True)
