"""Scenarios: AllReduce(wire="fp32") against DDP on the two example workloads, and one algorithm file under two runners."""

import copy
from typing import Any

import torch
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
    """Differences after 20 steps, to DDP and of DDP to itself with another bucket size.

    The largest one, and the root mean square: the largest of 32-bit weights is a unit in the last place of some big one.
    """
    result = {}
    for name, dtype in (("float64", torch.float64), ("float32", torch.float32)):
        start = workload.model().to(dtype)
        reference = train(here, workload, copy.deepcopy(start), dtype, bucket_cap_mb=25)
        other = train(here, workload, copy.deepcopy(start), dtype, bucket_cap_mb=0.1)
        mine = train(here, workload, copy.deepcopy(start), dtype)
        assert_same_on_all_ranks(here, mine)
        result |= {
            name: difference(reference, mine),
            f"{name} rms": root_mean_square(reference, mine),
            f"{name} rms, DDP to itself": root_mean_square(reference, other),
        }
    return result


def root_mean_square(one: nn.Module, other: nn.Module) -> float:
    return (values(one) - values(other)).square().mean().sqrt().item()


def train(here: Here, workload: Workload, model: nn.Module, dtype: torch.dtype, **ddp: Any) -> nn.Module:
    """Twenty steps with DDP if options for it are given, with gossamer otherwise."""
    optimizer = workload.optimizer(model)
    trained = DistributedDataParallel(model, **ddp) if ddp else model
    if not ddp:
        here.replicate(model, optimizer, AllReduce(wire="fp32"))
    for step in range(STEPS):
        optimizer.zero_grad()
        workload.loss(trained, workload.batch(here.rank, step, dtype)).backward()
        optimizer.step()
    here.close()
    return model
