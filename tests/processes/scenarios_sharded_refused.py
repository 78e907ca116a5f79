"""Scenarios: what cannot work with a model that is in parts is refused on every rank, soon and with the reason."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import gossamer
from gossamer import AllReduce
from gossamer.optim import OneBitAdam
from processes.expect import raises
from processes.sharded import Sharded, batch, loss_of, of_all, stage_of, transformer
from processes.worker import Here


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


@contextmanager
def refused(match: str, kind: type[Exception] = gossamer.ConfigurationError) -> Iterator[None]:
    """On every rank, within ten seconds."""
    begin = time.monotonic()
    with raises(kind, match=match):
        yield
    assert max(of_all(time.monotonic() - begin)) < 10


def a_group_over_the_parts(here: Here) -> None:
    for kind, dimension in (("fsdp", "shard"), ("tensor", "tensor")):
        parts = Sharded(kind)
        with refused(r"rank \d: parameter '.*' is sharded over ranks \[\d, \d\].*mesh\[\"replicate\"\]"):
            here.replicate(parts.model, sgd(parts.model), AllReduce(), mesh=parts.mesh[dimension])
        with refused(r"rank \d: parameter '.*' is sharded over ranks \[\d, \d\]"):
            here.replicate(parts.model, sgd(parts.model), AllReduce())
        here.replicate(parts.model, sgd(parts.model), AllReduce(), mesh=parts.mesh["replicate"])


def what_fsdp_replicates_already(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = transformer()
    fully_shard(model, mesh=mesh)
    with refused(r"parameter '.*' is replicated already"):
        here.replicate(model, sgd(model), AllReduce(), mesh=mesh["replicate"])


def different_parts_in_one_group(here: Here) -> None:
    parts = Sharded("fsdp")
    groups = [dist.new_group([0, 3]), dist.new_group([1, 2])]
    own = groups[0] if here.rank in (0, 3) else groups[1]
    with refused("ranks differ in model parameters.*part", gossamer.DisagreementError):
        here.replicate(parts.model, sgd(parts.model), AllReduce(), group=own)


def a_model_that_is_sharded_afterwards(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = transformer()
    optimizer = sgd(model)
    here.replicate(model, optimizer, AllReduce(), mesh=mesh["replicate"])
    fully_shard(model, mesh=mesh["shard"])
    loss_of(model(batch(0, here.rank)), batch(0, here.rank)).backward()
    with refused("replaced", gossamer.UsageError):
        optimizer.step()


def a_stage_without_parameters(here: Here) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "pipe"))
    model = stage_of(transformer(), 0) if mesh.get_local_rank("pipe") == 0 else nn.Sequential(nn.Flatten())
    other = nn.Linear(1, 1)  # torch refuses optimizers without parameters
    optimizer = sgd(model if list(model.parameters()) else other)
    if mesh.get_local_rank("pipe") == 0:
        here.replicate(model, optimizer, AllReduce(), mesh=mesh["replicate"], synchronize="step")
        dist.barrier()
    else:
        with raises(gossamer.ConfigurationError, match="no trainable parameter.*pipeline"):
            here.replicate(model, optimizer, AllReduce(), mesh=mesh["replicate"], synchronize="step")
        dist.barrier()


def what_needs_whole_parameters(here: Here) -> None:
    parts = Sharded("fsdp")
    mesh = parts.mesh["replicate"]
    with refused("OneBitAdam communicates for whole parameters"):
        here.replicate(parts.model, OneBitAdam(parts.model.parameters(), lr=0.1), mesh=mesh)
    with refused("overlap_forward=True cannot be used: parameters are sharded"):
        here.replicate(parts.model, sgd(parts.model), AllReduce(), mesh=mesh, overlap_forward=True)
    replica = here.replicate(parts.model, sgd(parts.model), AllReduce(), mesh=mesh)
    with refused("join.. cannot be used with sharded parameters", gossamer.UsageError), replica.join():
        pass
