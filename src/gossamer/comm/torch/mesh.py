"""Mesh: the process group that a ``DeviceMesh`` stands for, and the machine of this process in it."""

from typing import Any

from gossamer.errors import ConfigurationError


def place_in(mesh: Any, by_machine: bool) -> tuple[Any, int | None, tuple[int, ...] | None]:
    """The process group of a mesh, which machine this process is on, if the mesh says so, and the ranks of the mesh, if they
    are not those of the group.

    One dimension: the replicas, wherever they are. Two (``by_machine``): machines, by the workers of each. Nobody has a group
    of all of those, and nobody needs one: lanes make their own among the ranks.

    Raises:
        ConfigurationError: something else than a mesh, other dimensions, or a process that is not in it.
    """
    if not callable(getattr(mesh, "get_group", None)):
        raise ConfigurationError(f"mesh= takes a torch.distributed.device_mesh.DeviceMesh; got {mesh!r}")
    if mesh.ndim == 1:
        _row(mesh)
        return mesh.get_group(), None, None
    if mesh.ndim == 2 and by_machine:
        row = _row(mesh)
        return mesh.get_group(0), row, tuple(sorted(mesh.mesh.flatten().tolist()))
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
