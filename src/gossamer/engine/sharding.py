"""Sharding: parameters that are DTensors, of which each rank holds a part (FSDP2, tensor and expert parallelism).

Note [shards]: a replica exchanges the part that a rank holds itself. Its process group has the ranks with the same part of
the model, one per copy, so that the engine handles a part like a whole parameter. Only the part's memory is read and written:
``p.data`` and the DTensor around it belong to what sharded it. Parts without elements are not exchanged.

``_local_tensor`` and not ``to_local()``: the latter makes another tensor of it each time, and a gradient's has to be replaced.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gossamer.errors import ConfigurationError


def is_sharded(tensor: Any) -> bool:
    """Whether it is a DTensor: sharded, or kept equal, over a mesh of its own."""
    # Where nobody has imported it there is none, and importing it takes a second.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, its own memory; any other tensor itself."""
    if not is_sharded(tensor):
        return tensor
    own: Any = tensor._local_tensor  # type: ignore[attr-defined]
    if type(own).__name__ == "AsyncCollectiveTensor":
        own = own.wait()
    return own  # type: ignore[no-any-return]


def local_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """:func:`local` of each."""
    return {name: local(tensor) for name, tensor in tensors.items()}


def with_elements(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Those of which this rank holds anything, or that are no DTensors."""
    return {name: tensor for name, tensor in tensors.items() if not is_sharded(tensor) or local(tensor).numel()}


def set_local(tensor: Any, own: Tensor) -> None:
    """Make ``own`` what this rank holds of a DTensor."""
    tensor._local_tensor = own


def wrapped(own: Tensor, like: Any) -> Tensor:
    """A DTensor that is sharded like ``like``, of which this rank holds ``own``."""
    kind: Any = type(like.data)
    made: Tensor = kind.from_local(
        own, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def as_placed(gradient: Any, parameter: Any) -> Any:
    """The gradient, sharded as its parameter is: one may come as sums that are still to be made over the mesh."""
    if gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


def described(tensor: Any) -> str:
    """How a parameter is sharded, and which part this rank has; nothing of a plain one."""
    if not is_sharded(tensor):
        return ""
    mesh = tensor.device_mesh
    placements = ", ".join(map(str, tensor.placements))
    return f", sharded [{placements}] over {list(mesh.shape)}, part {mesh.get_coordinate()}: {list(local(tensor).shape)}"


def check_sharding(parameters: Mapping[str, Any], members: Sequence[int], rank: int) -> None:
    """Raise ConfigurationError where a parameter is sharded over the ranks that are to be replicas. ``members``: their global
    ranks; ``rank``: the place of this one among them."""
    for name, parameter in parameters.items():
        if not is_sharded(parameter):
            continue
        inside = set(parameter.device_mesh.mesh.flatten().tolist())
        if len(shared := sorted(inside & set(members))) > 1:
            raise ConfigurationError(
                f"rank {rank}: parameter {name!r} is {_how(parameter, members)} over ranks {sorted(inside)}, of which "
                f"{shared} are in the group of this replica too. A replica has one rank for each copy of the model: shard "
                'over one dimension of a mesh (fully_shard(model, mesh=mesh["shard"])), and give replicate() the other one '
                '(mesh=mesh["replicate"])'
            )


def _how(parameter: Any, members: Sequence[int]) -> str:
    """Whether the mesh already replicates it over ``members``, as FSDP2 does over the first of two dimensions."""
    mesh, whole = parameter.device_mesh, slice(None)
    for dim, placement in enumerate(parameter.placements):
        row = mesh.mesh[tuple(whole if each == dim else place for each, place in enumerate(mesh.get_coordinate()))]
        if placement.is_replicate() and len(set(row.tolist()) & set(members)) > 1:
            return "replicated already, by whatever made it a DTensor,"
    return "sharded"


def sharded_modules(model: nn.Module) -> list[Any]:
    """The modules that FSDP2 shards (``fully_shard``)."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    kind = None if fsdp is None else getattr(fsdp, "FSDPModule", None)
    return [] if kind is None else [module for module in model.modules() if isinstance(module, kind)]


def reshard(model: nn.Module) -> None:
    """Free what FSDP2 has gathered, so that the next forward pass gathers the parts as they are then.

    It keeps the outermost module's parameters whole after a forward pass without a backward pass.
    """
    for module in sharded_modules(model):
        module.reshard()


def offloads(model: nn.Module) -> bool:
    """Whether FSDP2 keeps parts of the model on the host (``CPUOffloadPolicy``)."""
    groups = (group for module in sharded_modules(model) for group in _groups(module._get_fsdp_state()))
    return any(getattr(part, "offload_to_cpu", False) for group in groups for part in group.fsdp_params)


def _groups(state: Any) -> list[Any]:
    several = getattr(state, "_fsdp_param_groups", None)  # one group before torch 2.12
    return list(several) if several is not None else [each for each in [state._fsdp_param_group] if each is not None]


@torch.no_grad()
def sum_of_parts(values: Mapping[str, Tensor], tensors: Mapping[str, Any]) -> float:
    """The sum of one number per tensor, each of the part that this rank holds, over all parts of the model.

    Collective over the meshes of ``tensors``; of tensors that a mesh keeps equal, each counts once.
    """
    total = 0.0
    for kind in dict.fromkeys(_parts_of(tensors[name]) for name in tensors):
        mine = [values[name] for name in tensors if name in values and _parts_of(tensors[name]) == kind]
        total += _over_mesh(sum(map(float, mine)), *kind)
    return total


def _parts_of(tensor: Any) -> tuple[Any, tuple[int, ...]]:
    """The mesh over which a tensor is sharded, and which of its dimensions."""
    if not is_sharded(tensor):
        return None, ()
    return tensor.device_mesh, tuple(dim for dim, placement in enumerate(tensor.placements) if not placement.is_replicate())


def _over_mesh(value: float, mesh: Any, dims: Iterable[int]) -> float:
    if mesh is None:
        return value
    tensors: Any = sys.modules["torch.distributed.tensor"]
    placements = [tensors.Partial() if dim in dims else tensors.Replicate() for dim in range(mesh.ndim)]
    mine = torch.tensor(value, dtype=torch.float64, device=mesh.device_type)
    return float(tensors.DTensor.from_local(mine, mesh, placements, run_check=False).full_tensor())
