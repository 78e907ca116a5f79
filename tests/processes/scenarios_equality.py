"""Scenarios: AllReduce(wire="fp32") against DDP on the two example workloads, and one algorithm file under two runners."""

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gossamer import AllReduce
from processes import workloads
from processes.twins import assert_same_on_all_ranks, difference, values
from processes.worker import Here
from processes.workloads import Workload

STEPS = 20


def gpt_small(here: Here) -> dict[str, float]:
    return figures(here, workloads.gpt(layers=2, width=64, context=32, batch=4))


def convnet_small(here: Here) -> dict[str, float]:
    return figures(here, workloads.convnet(hidden=64, batch=8))


def gpt_full(here: Here) -> dict[str, float]:
    return figures(here, workloads.gpt())


def convnet_full(here: Here) -> dict[str, float]:
    return figures(here, workloads.convnet())


def figures(here: Here, workload: Workload) -> dict[str, float]:
    """Differences after 20 steps, to DDP and of DDP to itself, with another bucket size or adding up in another order.

    The largest one, and the root mean square: the largest of 32-bit weights is a unit in the last place of some big one. Which
    roundings differ, and whether one of them decides a maximum of a pooling layer, depends on the processor.
    """
    result = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        start = workload.model().to(dtype)
        reference = train(here, workload, copy.deepcopy(start), dtype, bucket_cap_mb=25)
        other = train(here, workload, copy.deepcopy(start), dtype, bucket_cap_mb=0.1)
        reordered = train(here, workload, copy.deepcopy(start), dtype, in_rank_order=True, bucket_cap_mb=25)
        mine = train(here, workload, copy.deepcopy(start), dtype)
        assert_same_on_all_ranks(here, mine)
        result |= {
            name: difference(reference, mine),
            f"{name} rms": root_mean_square(reference, mine),
            f"{name}, DDP to itself": max(difference(reference, other), difference(reference, reordered)),
            f"{name} rms, DDP to itself": max(root_mean_square(reference, other), root_mean_square(reference, reordered)),
        }
    return result


def root_mean_square(one: nn.Module, other: nn.Module) -> float:
    return (values(one) - values(other)).square().mean().sqrt().item()


def mean_in_rank_order(state: None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """A hook for DDP: the mean, added up from rank 0 on, where Gloo's ring begins elsewhere for each part."""
    own = bucket.buffer()
    everyone = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, own)
    done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    done.set_result(torch.stack(everyone).sum(0) / len(everyone))
    return done


def train(
    here: Here, workload: Workload, model: nn.Module, dtype: torch.dtype, in_rank_order: bool = False, **ddp: Any
) -> nn.Module:
    """Twenty steps with DDP if options for it are given, with gossamer otherwise."""
    optimizer = workload.optimizer(model)
    trained = DistributedDataParallel(model, **ddp) if ddp else model
    if in_rank_order:
        trained.register_comm_hook(None, mean_in_rank_order)
    if not ddp:
        here.replicate(model, optimizer, AllReduce(wire="fp32"))
    for step in range(STEPS):
        optimizer.zero_grad()
        workload.loss(trained, workload.batch(here.rank, step, dtype)).backward()
        optimizer.step()
    here.close()
    return model
